"""Figures of the ``trace`` job for models that are simulated."""

from collections.abc import Iterable, Sequence
from typing import Any

from autotune.memory.values import Allocation, Trace
from autotune.speed.values import Kernel, StepWork

MODEL_FIGURES = {
    "parameters": 75_000_000,
    "attention": "sdpa",
    "attention_reason": "asked for",
}
"""Figures that do not depend on the micro-batch size."""


def trace_of(
    size: int,
    allocations: Sequence[Allocation],
    events: Sequence[int],
    *,
    predicted_tokens: int = 0,
    repeats_from: int = 0,
) -> Trace:
    """Return a trace with these allocations, of sequences of 64 tokens.

    Its kernels and FLOPs are arbitrary.
    """
    work = StepWork(
        micro_batch_size=size,
        padded_tokens=64 * size,
        model_flops=1e9,
        kernels=((Kernel("copy"), 1),),
    )
    return Trace(
        work=work,
        predicted_tokens=predicted_tokens,
        allocations=tuple(allocations),
        events=tuple(events),
        repeats_from=repeats_from,
    )


def figures_of(traces: Iterable[Trace]) -> dict[str, Any]:
    """Return the figures of a trial of the ``trace`` job with these traces."""
    return MODEL_FIGURES | {"traces": [trace.to_json() for trace in traces]}
