"""Predicted steps of code of yours on more nodes. Pure.

Nothing is known of a step but its time on one rank and the size of its gradients. So
backward is assumed to take two thirds of it, and gradients to become ready evenly
during that; they are sent as DDP does in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.evidence.network import (
    GradientPart,
    GradientSync,
    Network,
    NodesRow,
    RankCompute,
)
from autotune.network.decide.step_model import FP32_BYTES, step_time

GRADIENT_PARTS = 32
"""Equal parts in which gradients are assumed to become ready."""
ASSUMPTIONS = (
    "assumed: backward takes two thirds of a step, and gradients become ready evenly",
    "assumed: DDP in fp32 with buckets of 25 MiB",
    "the size on each rank stays, so that the global batch grows with the ranks",
)
"""Assumptions of a prediction, besides measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnScaling:
    """Predicted steps of code of yours on more nodes."""

    name: str
    """Name of the subject."""
    unit: str
    """Unit of throughput, as a plural."""
    rows: tuple[NodesRow, ...]
    """Predictions, by number of nodes."""
    sources: tuple[str, ...]
    """Their assumptions, a sentence each."""


def predict_nodes(
    step_s: float,
    gradient_bytes: int,
    units_per_step: float,
    network: Network,
    counts: Sequence[int],
) -> tuple[NodesRow, ...]:
    """Return the predicted step on each number of nodes.

    Args:
        step_s: Time of the step on one rank.
        gradient_bytes: Size of all gradients, in fp32.
        units_per_step: Units of a step on one rank.
        network: Links between and within nodes; its number of nodes does not matter.
        counts: Numbers of nodes.
    """
    elements = max(1, gradient_bytes // FP32_BYTES // GRADIENT_PARTS)
    gradients = tuple(
        GradientPart(elements=elements, ready_share=number / GRADIENT_PARTS)
        for number in range(1, GRADIENT_PARTS + 1)
    )
    compute = RankCompute(
        sequence_s=0.0,
        micro_batch_s=step_s,
        optimizer_step_s=0.0,
        gradients=gradients,
    )
    rows = []
    for nodes in counts:
        there = replace(network, nodes=nodes)
        predicted_s = step_time(compute, 0, 1, GradientSync(), there).step_s
        rows.append(
            NodesRow(
                nodes=nodes,
                step_s=predicted_s,
                units_per_s=units_per_step * there.ranks / predicted_s,
                efficiency=step_s / predicted_s,
            )
        )
    return tuple(rows)
