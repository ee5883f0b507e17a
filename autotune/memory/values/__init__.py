"""Values of memory.

``requests`` has the requests of trials, ``traces`` the allocations of a step, and
``predictions`` the predicted memory.
"""

from autotune.memory.values.predictions import (
    Alternative,
    Answer,
    MemoryBreakdown,
    MemoryParts,
    MemoryPlan,
    PredictedModel,
    Share,
)
from autotune.memory.values.requests import (
    KernelsRequest,
    ModelTraceRequest,
    StepRequest,
    TraceRequest,
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
    "Alternative",
    "Answer",
    "KernelsRequest",
    "MemoryBreakdown",
    "MemoryParts",
    "MemoryPlan",
    "ModelTraceRequest",
    "PredictedModel",
    "Share",
    "StepRequest",
    "Term",
    "Trace",
    "TraceRequest",
    "activations_of",
]
