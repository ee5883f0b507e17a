"""Nouns of training over a network: links, what a rank computes, and how gradients are exchanged."""

from dataclasses import dataclass
from typing import Literal

from trainer.config.train_config import GradientDtype, Strategy

ELEMENT_BYTES: dict[GradientDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
MIB = 2**20
Scope = Literal["within nodes", "between nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message pays on its way from one neighbour to the next."""

    latency_s: float
    """Of each hop, whatever its size."""
    bytes_per_s: float
    """Of one direction: between nodes of a node's network card, within a node of one GPU's links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes of equally many ranks."""

    nodes: int
    ranks_per_node: int
    between: Link
    within: Link | None = None
    """None where a node has one rank, or what it costs there is not known: then it counts as nothing."""
    trees: bool = True
    """Whether messages may go down a tree, as NCCL lets them; gloo knows the ring only."""
    all_reduce_factor: float = 1.0
    """What all-reduces over several nodes of several ranks were measured to take, of what both links make of them."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """The gradient of one parameter, or of several that are ready together."""

    elements: int
    ready_share: float
    """After which part of backward it may leave, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompute:
    """What a step costs a rank without any exchange, while all other ranks of its node compute as well."""

    row_s: float
    """Forward and backward, of each row of a micro-batch."""
    micro_batch_s: float
    """The same, of each micro-batch, however many rows it has."""
    update_s: float
    """Clipping and the optimizer, once a step, with all of its state on this rank."""
    gradients: tuple[GradientPart, ...]
    """In the order in which they are ready."""
    forward_share: float = 1 / 3
    """Of forward and backward; a third, as backward has twice the products (no layer recomputed)."""
    jitter_share: float = 0.0
    """Standard deviation of one rank's time for a micro-batch, as part of that time: all wait for the slowest."""
    slowdown_share: float = 0.0
    """What computation loses while gradients travel, to the kernels or the CPU time that move them."""

    @property
    def elements(self) -> int:
        """Of all gradients."""
        return sum(part.elements for part in self.gradients)

    def forward_backward_s(self, rows: float) -> float:
        """Of one micro-batch."""
        return self.micro_batch_s + rows * self.row_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How ranks exchange gradients."""

    strategy: Strategy = "ddp"
    gradient_dtype: GradientDtype = "fp32"
    bucket_cap_bytes: int = 25 * MIB
    shard_within_nodes: bool = False
    """With ``fsdp2``: each node holds one copy of the model (HSDP), rather than all nodes together."""

    @property
    def name(self) -> str:
        """Name it for tables."""
        kind = "hsdp" if self.shard_within_nodes else self.strategy
        cap = "" if self.strategy == "fsdp2" else f", {self.bucket_cap_bytes // MIB} MiB buckets"
        return f"{kind}, {self.gradient_dtype}{cap}"
