"""Values of memory.

``traces`` has the allocations of a step and the requests of the ``step`` and ``trace``
jobs, ``evidence`` the result of a probe, and ``predictions`` the predicted memory.
"""

from autotune.evidence.probe import (
    LOWER_BOUND,
    CurvePoint,
    GrownKernel,
    ProbeEvidence,
    ThroughputDip,
)
from autotune.memory.values.predictions import (
    Alternative,
    Answer,
    MemoryBreakdown,
    MemoryParts,
    MemoryPlan,
    PredictedModel,
    Share,
)
from autotune.memory.values.traces import (
    ACTIVATIONS,
    Allocation,
    KernelsRequest,
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
    "Alternative",
    "Answer",
    "CurvePoint",
    "GrownKernel",
    "KernelsRequest",
    "MemoryBreakdown",
    "MemoryParts",
    "MemoryPlan",
    "PredictedModel",
    "ProbeEvidence",
    "Share",
    "StepRequest",
    "Term",
    "ThroughputDip",
    "Trace",
    "TraceRequest",
    "activations_of",
]
