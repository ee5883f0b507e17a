"""Values of memory.

``traces`` has the allocations of a step and the requests of the ``step`` and ``trace``
jobs, ``evidence`` the result of a probe, and ``predictions`` the predicted memory.
"""

from autotune.memory.values.evidence import LOWER_BOUND, CurvePoint, ProbeEvidence
from autotune.memory.values.predictions import (
    Answer,
    MemoryBreakdown,
    MemoryPlan,
    PredictedModel,
    Share,
    StateBytes,
)
from autotune.memory.values.traces import (
    ACTIVATIONS,
    Allocation,
    StepRequest,
    Term,
    Trace,
    TraceRequest,
    activations_of,
)

__all__ = [
    "ACTIVATIONS",
    "LOWER_BOUND",
    "Allocation",
    "Answer",
    "CurvePoint",
    "MemoryBreakdown",
    "MemoryPlan",
    "PredictedModel",
    "ProbeEvidence",
    "Share",
    "StateBytes",
    "StepRequest",
    "Term",
    "Trace",
    "TraceRequest",
    "activations_of",
]
