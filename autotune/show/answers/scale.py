"""What ``autotune scale --json`` answers: one value for each profile."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.evidence import ScalingRow
from autotune.show.scaling import Scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPoint:
    """Efficiency on so many nodes if all of backward could hide the exchange."""

    nodes: int
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAnswer:
    """Training the same global batch on more and more nodes."""

    model: str
    global_batch_tokens: int
    """Real ones of a step."""
    useful_nodes: int
    """The most that are at least 90 % efficient; predicted."""
    levers: tuple[str, ...]
    """What would lift it."""
    steps_per_epoch: float | None
    """Null without a dataset."""
    bound_efficiency: tuple[BoundPoint, ...]
    least_tokens_per_rank: float
    """T_min: real tokens of each rank and step for that bound over many nodes, with fp32 gradients."""
    sources: tuple[str, ...]
    """What the figures rest on."""
    rows: tuple[ScalingRow, ...]


def scale_answer(every: Sequence[Scaled]) -> list[ScaleAnswer]:
    """Every profile's curve."""
    return [
        ScaleAnswer(
            model=scaled.name,
            global_batch_tokens=scaled.global_batch_tokens,
            useful_nodes=scaled.useful_nodes,
            levers=tuple(scaled.levers),
            steps_per_epoch=scaled.steps_per_epoch,
            bound_efficiency=tuple(BoundPoint(nodes=nodes, efficiency=share) for nodes, share in scaled.bound),
            least_tokens_per_rank=scaled.least_tokens_per_rank,
            sources=tuple(scaled.sources),
            rows=tuple(scaled.rows),
        )
        for scaled in every
    ]
