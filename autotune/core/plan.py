"""Nouns of a plan: what a training is going to take, said before it is paid for.

Every figure carries one of four words. *Given*: the user said it, or it follows from that alone. *Measured*: a
profile's evidence or a dataset says it. *Predicted*: computed from what was measured or given. *Assumed*: something
that nobody measured here goes into it; what is computed from such a figure is assumed as well.
"""

from dataclasses import dataclass
from typing import Literal

Basis = Literal["given", "measured", "predicted", "assumed"]
BASES: tuple[Basis, ...] = ("given", "measured", "predicted", "assumed")
"""From the best known to the least."""

GoalKind = Literal["tokens", "epochs", "flops", "hours", "steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure, how far it may be off, and what it rests on."""

    value: float
    """In the unit that the figure's name says."""
    low: float | None = None
    """Lower bound; None where nothing tells one."""
    high: float | None = None
    """Upper bound."""
    confidence: float | None = None
    """Of the bounds; None where they are a range, as of what is assumed."""
    basis: Basis
    """What it rests on."""
    source: str
    """Where it comes from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How long to train, in the one way that was asked for."""

    kind: GoalKind
    """What was asked for."""
    amount: float
    """How much of it."""
    source: str
    """Who says so, such as ``--tokens 45.2B``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines that are going to train."""

    device: Literal["cuda", "cpu"]
    """What trains."""
    name: str
    """Of the card, or of the CPU."""
    nodes: int
    """That are meant."""
    ranks_per_node: int
    """GPUs of a node; on a CPU, training processes."""
    cpus_per_rank: float | None = None
    """Of a CPU; None on GPUs."""
    memory_bytes: int | None
    """Of a rank; None where nobody says."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimal:
    """The size of a model and the tokens that go with an amount of compute."""

    parameters: float
    """N."""
    tokens: float
    """D."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """What one GPU holds under one way of sharing the model."""

    name: str
    """Of the way."""
    state_bytes: int
    """Parameters, gradients and the optimizer's, with what is gathered of them at the moment."""
    activations_bytes: int
    """Of a micro-batch, head and loss included."""
    other_bytes: int
    """Temporaries, and what lies outside the allocator."""
    fits: bool | None
    """None where the memory of a rank is not known."""
    trains_here: bool
    """Whether this project's trainer can; the others are formulas for comparison."""

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.state_bytes + self.activations_bytes + self.other_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of one rank."""

    rows: tuple[MemoryRow, ...]
    micro_batch_rows: int
    """Of a rank, for which the figures are."""
    most_rows: int
    """That fit with the headroom left; 0 where not one does without sharing."""
    basis: Basis
    """What the figures rest on."""
    source: str
    """Where they come from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What saving takes on the disk."""

    one: Figure
    """Bytes of one checkpoint, of all ranks' files together."""
    kept: int
    """At the end, at most."""
    disk: Figure
    """Bytes at most at once: those kept, the one being written, the one a rollback would take, the exported model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would make the same nodes train more efficiently."""

    change: str
    """Alone, with all else as it is."""
    efficiency: float
    """Then, of the same nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a training takes. A figure that nothing tells is None."""

    model: str
    fleet: Fleet
    goal: Goal
    parameters: Figure | None
    tokens: Figure
    """Real ones, special tokens included."""
    batch_tokens: Figure
    """Real tokens of a step over all ranks."""
    micro_batches: int
    steps: Figure
    passes: Figure | None
    """Over the dataset."""
    rank_tokens_per_s: Figure | None
    """Real tokens/s of one rank, on one node."""
    efficiency: Figure | None
    """Of all nodes, against as many times one."""
    tokens_per_s: Figure | None
    """Real ones, of all ranks."""
    wall_s: Figure | None
    device_hours: Figure | None
    """GPU-hours; on a CPU, CPU-hours."""
    price_per_device_hour: float | None
    cost: Figure | None
    """In the currency of the price."""
    power_w: Figure | None
    """Of one GPU."""
    energy_kwh: Figure | None
    """Of the GPUs alone."""
    flops_counted: Figure | None
    """What the mathematics of the real tokens asks for."""
    flops_6n: Figure | None
    """Six operations for each parameter and token."""
    optimal: Optimal | None
    """For ``flops_6n``."""
    checkpoints: CheckpointPlan | None
    memory: MemoryPlan | None
    memory_missing: str | None = None
    """Why there is none."""
    warnings: tuple[str, ...]
    left_out: tuple[str, ...]
    next_command: str
