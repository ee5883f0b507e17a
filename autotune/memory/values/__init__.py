"""Values of memory.

``requests`` has the requests of trials, ``traces`` the allocations of a step, and
``predictions`` the predicted memory.
"""

from autotune.memory.values.predictions import (
    MemoryBreakdown,
    MemoryParts,
    Share,
)
from autotune.memory.values.requests import (
    KernelsRequest,
    ModelTraceRequest,
    StepRequest,
)
from autotune.memory.values.traces import (
    ACTIVATIONS,
    Allocation,
    Term,
    Trace,
    activations_of,
)

__all__ = [
    "ACTIVATIONS",
    "Allocation",
    "KernelsRequest",
    "MemoryBreakdown",
    "MemoryParts",
    "ModelTraceRequest",
    "Share",
    "StepRequest",
    "Term",
    "Trace",
    "activations_of",
]
