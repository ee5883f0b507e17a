"""Types of the arrays that the modules of this package exchange."""

from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Uint64 = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.integer[Any]]
"""Token ids, in the type in which a dataset stores them: uint16 or uint32."""
