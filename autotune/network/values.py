"""Nouns of training over a network: links, what a rank computes, and how gradients are exchanged."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from autotune.base.interval import Interval, NonNegative, NonNegativeFloat, Positive, PositiveFloat, RatioBounds
from autotune.trials.values import JobName, Share, TrialRequest
from trainer.config.tables import StrictTable
from trainer.config.train_config import GradientDtype, Strategy, TrainConfig

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

    sequence_s: float
    """Forward and backward, of each row of a micro-batch."""
    micro_batch_s: float
    """The same, of each micro-batch, however many rows it has."""
    optimizer_step_s: float
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
        return self.micro_batch_s + rows * self.sequence_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
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


class LinksRequest(TrialRequest):
    """Time messages of several sizes between ranks."""

    job: ClassVar[JobName] = "links"

    sizes_bytes: list[int]
    repeats: int
    seconds: float
    """Time limit for each size; no further message is sent after it."""
    nodes: int
    ranks_per_node: int


class GradientSyncRequest(TrialRequest):
    """Train all ranks on the dataset's rows, from memory."""

    job: ClassVar[JobName] = "gradient_sync"

    config: TrainConfig
    """The trainer's settings, with the gradient exchange to try."""
    steps: int
    synchronise: bool
    """Exchange gradients; False skips only that (DDP and ZeRO-1)."""
    round: int
    nodes: int
    ranks_per_node: int


class LinkEvidence(StrictTable):
    """A kind of link, from all-reduces of many sizes; bounds are of 98 % confidence."""

    scope: Scope
    members: Annotated[int, Field(ge=2)]
    """Ranks of a node, or nodes, that took part."""
    latency_s: NonNegativeFloat
    """Of one hop."""
    latency_s_low: NonNegativeFloat | None = None
    latency_s_high: NonNegativeFloat | None = None
    bytes_per_s: PositiveFloat
    bytes_per_s_low: NonNegativeFloat | None = None
    bytes_per_s_high: NonNegativeFloat | None = None
    worst_error_share: NonNegativeFloat
    """Of the straight line at any size."""

    @property
    def link(self) -> Link:
        """The likely link."""
        return Link(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s)

    @property
    def ends(self) -> tuple[Link, Link] | None:
        """The link at the worse and at the better end of its bounds; None without bounds."""
        slow, fast = self.bytes_per_s_low, self.bytes_per_s_high
        late, early = self.latency_s_high, self.latency_s_low
        if slow is None or fast is None or late is None or early is None:
            return None
        return Link(latency_s=late, bytes_per_s=slow), Link(latency_s=early, bytes_per_s=fast)


class ComputeEvidence(StrictTable):
    """What a step costs a rank while all ranks compute and no gradient synchronise."""

    micro_batch_size: Positive
    micro_batch_s: PositiveFloat
    """Forward and backward of a micro-batch of so many rows."""
    fixed_s: NonNegativeFloat
    """Part of it that does not grow with the rows."""
    optimizer_step_s: NonNegativeFloat
    """Clipping and optimizer."""
    forward_share: Annotated[float, Field(gt=0, lt=1)]
    """Part of a micro-batch's time that is forward."""
    jitter_share: NonNegativeFloat
    """Standard deviation of one rank's time."""
    slowdown_share: Share
    """What computing loses while gradients travel."""
    gradient_elements: list[Positive]
    """Of gradients in the order in which they are ready, small ones together."""
    gradient_ready_shares: list[Share]
    """After which part of backward each is."""

    @property
    def of_rank(self) -> RankCompute:
        """The same for any number of rows."""
        parts = zip(self.gradient_elements, self.gradient_ready_shares, strict=True)
        return RankCompute(
            sequence_s=(self.micro_batch_s - self.fixed_s) / self.micro_batch_size,
            micro_batch_s=self.fixed_s,
            optimizer_step_s=self.optimizer_step_s,
            gradients=tuple(GradientPart(elements=elements, ready_share=ready) for elements, ready in parts),
            forward_share=self.forward_share,
            jitter_share=self.jitter_share,
            slowdown_share=self.slowdown_share,
        )


class GradientSyncSplit(StrictTable):
    """One way to exchange gradients, named as in ``train.parallel``, and how it splits the global batch."""

    strategy: Strategy
    shard_ranks: Positive | None = None
    gradient_dtype: GradientDtype
    bucket_cap_mib: Positive
    gradient_accumulation_steps: Positive
    """Of an optimizer step, on each rank."""
    micro_batch_size: Positive
    """Of a micro-batch."""
    added_micro_batches: NonNegative = 0
    """Of a measured step, which were not measured but added as predicted."""

    @property
    def gradient_sync(self) -> GradientSync:
        """How gradients are exchanged."""
        return GradientSync(
            strategy=self.strategy,
            gradient_dtype=self.gradient_dtype,
            bucket_cap_bytes=self.bucket_cap_mib * MIB,
            shard_within_nodes=self.shard_ranks is not None,
        )


class GradientSyncRow(GradientSyncSplit, RatioBounds):
    """One way to exchange gradients: what it was predicted to take, and took."""

    predicted_step_s: PositiveFloat | None = None
    """Before it was measured."""
    step_s: PositiveFloat | None = None
    """Median; None where it did not run."""
    steps: NonNegative
    tokens_per_s: NonNegativeFloat | None = None
    """Of all ranks."""
    compute_share: Share | None = None
    """Of the step, in which a rank computes."""
    communication_share: Share | None = None
    """Of the step, in which ranks waited for gradients or weights."""
    peak_bytes: Positive | None = None
    """Memory of the rank that needed most."""
    ratio_to_default: PositiveFloat | None = None
    """Real tokens/s, rounds against each other; None for the default itself, and where that was not repeated."""
    outcome: str

    @property
    def ratio(self) -> Interval | None:
        """The ratio to the default with its bounds; None if there is none."""
        return None if self.ratio_to_default is None else self.bounded(self.ratio_to_default)


class ScalingRow(GradientSyncSplit):
    """Training the same global batch on so many nodes."""

    nodes: Positive
    step_s: PositiveFloat
    tokens_per_s: PositiveFloat
    """Of all nodes."""
    efficiency: PositiveFloat
    """Against as many times one node."""
    efficiency_low: NonNegativeFloat | None = None
    """From the intervals of the links."""
    efficiency_high: NonNegativeFloat | None = None
    limit: str
    """What costs most beside computing."""
    limit_share: Share | None = None
    """Part of the step that it costs; None where that is next to nothing, or where a figure was measured."""
    measured: bool


class NetworkEvidence(StrictTable):
    """How ranks reach each other, what that costs a step, and how many nodes are useful."""

    nodes: Positive
    ranks_per_node: Positive
    backend: str
    """``nccl`` or ``gloo``."""
    interface: str | None = None
    interface_bytes_per_s: Positive | None = None
    """What the interface says of itself."""
    transport: str
    """What carries the messages, or why that is not known."""
    links: list[LinkEvidence]
    all_reduce_factor: PositiveFloat = 1.0
    """What all-reduces of all ranks took of what these links make of them; 1 where that was not measured."""
    warnings: list[str] = Field(default_factory=list)
    """Slow links, slow ranks, an interface that does not reach its speed."""
    matmul_flops_per_s: list[NonNegativeFloat]
    """Of each rank while all multiply matrices."""
    default_micro_batch_size: Positive | None = None
    """The micro-batch as probed, which the default exchange has; None where no training step was measured."""
    compute: ComputeEvidence | None = None
    gradient_syncs: list[GradientSyncRow] = Field(default_factory=list)
    scaling: list[ScalingRow] = Field(default_factory=list)
    useful_nodes: Positive | None = None
    """The largest number of at least 90 % efficiency at this global batch; predicted."""
    levers: list[str] = Field(default_factory=list)
    """What would make more nodes useful."""
    choice: str
    equal_loss: str | None = None
    """What a check of 16-bit gradients against 32-bit ones found; None where there was none."""
    windows: NonNegative
    seconds: NonNegativeFloat
