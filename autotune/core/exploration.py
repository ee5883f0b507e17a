"""The evidence of an exploration, as a table of the profile."""

from typing import Annotated

from pydantic import Field

from autotune.core.interval import CONFIDENCE, Interval
from autotune.core.knobs import Knobs
from trainer.config import Attention, Checkpointing, Layout, Precision
from trainer.schema import Table

Positive = Annotated[int, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class KnobSettings(Table):
    """Settings of a step that were tried together."""

    precision: Precision
    attention: Attention
    checkpointing: Checkpointing
    compile_layers: bool
    layout: Layout
    micro_batch_rows: Positive

    @property
    def name(self) -> str:
        """In a few words, for people."""
        return Knobs(**self.model_dump()).name


class ExploredRow(Table):
    """What was tried, and what it gave."""

    settings: KnobSettings
    windows: Annotated[int, Field(ge=0)]
    """Full and short ones."""
    real_tokens_per_s: PositiveFloat | None = None
    """Median; None where it did not run."""
    ratio_to_unexplored: PositiveFloat | None = None
    """To the unexplored settings, read in the same round: median of its full windows, of short ones where there is no
    full one. None of the unexplored settings themselves, and where nothing ran."""
    outcome: str
    """``ran``, ``pruned`` after a short window, or why it did not run."""


class ExploreEvidence(Table):
    """What a search over the settings of the step found."""

    cells: Positive
    """Of the space, in which every cell is a way to train that fits, as far as memory is predicted."""
    trials: Annotated[int, Field(ge=0)]
    """Different cells that were tried, those that did not run included."""
    windows: Annotated[int, Field(ge=0)]
    pruned: Annotated[int, Field(ge=0)]
    """Cells that one short window was enough for."""
    unexplored: KnobSettings
    chosen: KnobSettings
    """The same as ``unexplored`` where nothing was proven to be faster."""
    candidate: KnobSettings
    """What promised most, and was held against the unexplored settings."""
    ratio_to_unexplored: PositiveFloat
    """Real tokens/s of the candidate, windows of the same rounds against each other."""
    ratio_low: PositiveFloat | None = None
    """98 % bounds."""
    ratio_high: PositiveFloat | None = None
    adopted: bool

    @property
    def ratio(self) -> Interval:
        """The ratio to the unexplored settings with its bounds."""
        return Interval.of(self.ratio_to_unexplored, self.ratio_low, self.ratio_high, CONFIDENCE)

    choice: str
    """Why the settings are what they are."""
    stopped_because: str
    equal_loss: str | None = None
    """What a check of the loss found where rounding differs: of the chosen settings, or of faster ones that are not
    taken for it. None where there was nothing to check."""
    left_out: list[str] = Field(default_factory=list)
    """Knobs and values that were not explored, and why."""
    rows: list[ExploredRow]
    seconds: NonNegativeFloat
