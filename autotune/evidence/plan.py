"""Figures of a plan with their basis, its goal, and the machines."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from autotune.base.interval import Interval

Basis = Literal["given", "measured", "predicted", "assumed"]
BASES: tuple[Basis, ...] = get_args(Basis)
"""Bases of a figure, the best known first: *given* by the user; *measured*, in a
profile or dataset; *predicted* from those; *assumed*, if any part of it was neither
given nor measured."""

GoalKind = Literal["units", "epochs", "flops", "hours", "steps"]
"""Ways to say the length of a training; ``units`` are those of its throughput."""
GOALS: tuple[GoalKind, ...] = get_args(GoalKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigure(Interval):
    """A figure and its basis; with bounds if it follows from a measured interval."""

    basis: Basis
    source: str

    @classmethod
    def on(cls, basis: Basis, known: Interval, source: str) -> "PlanFigure":
        """Return a figure with the value and the bounds of an interval."""
        return cls(**asdict(known), basis=basis, source=source)


def derived(compute: Callable[..., float], *of: PlanFigure, source: str) -> PlanFigure:
    """Return a figure computed from others.

    ``compute`` also maps the ends of a single interval, so it must be monotone.
    """
    values = [one.value for one in of]
    found = Interval(value=compute(*values))
    bounded = [
        number
        for number, one in enumerate(of)
        if one.low is not None and one.high is not None
    ]
    if len(bounded) == 1:
        at, one = bounded[0], of[bounded[0]]
        low, high = sorted(
            compute(*values[:at], end, *values[at + 1 :]) for end in (one.low, one.high)
        )
        found = replace(found, low=low, high=high, confidence=one.confidence)
    return PlanFigure.on(derived_basis(*of), found, source)


def derived_basis(*of: PlanFigure) -> Basis:
    """Return the basis of a figure derived from others.

    It is given if all are, assumed if one is, else predicted.
    """
    weakest = max((one.basis for one in of), key=BASES.index)
    return weakest if weakest in ("given", "assumed") else "predicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Length of the training in one unit."""

    kind: GoalKind
    amount: float
    source: str
    """Origin of the goal, such as ``--tokens 45.2B``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Machines that the training is planned for."""

    device: Literal["cuda", "cpu"]
    name: str
    nodes: int
    ranks_per_node: int
    """GPUs per node; on a CPU, training processes."""
    cpus_per_rank: float | None = None
    """CPUs for each rank of training on a CPU; None on GPUs."""
    memory_bytes: int
    """Memory budget of one rank."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node
