"""Types of numbers with a bound, for fields that are read from files."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(gt=0)]
"""Integer of at least 1."""
NonNegative = Annotated[int, Field(ge=0)]
"""Integer of at least 0."""
PositiveFloat = Annotated[float, Field(gt=0)]
"""Number above 0."""
NonNegativeFloat = Annotated[float, Field(ge=0)]
"""Number of at least 0."""
