"""Evidence of the links between ranks, gradient synchronisation and scaling."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import Interval, RatioBounds
from autotune.evidence.gpu_use import Share
from trainer.formats.tables import StrictTable
from trainer.formats.train_config import GradientDtype, Strategy

ELEMENT_BYTES: dict[GradientDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
MIB = 2**20
Scope = Literal["within nodes", "between nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Latency and bandwidth between neighbours."""

    latency_s: float
    """Latency of each hop."""
    bytes_per_s: float
    """Bandwidth of one direction: of a node's NIC between nodes, of one GPU's links
    within a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes with equal numbers of ranks."""

    nodes: int
    ranks_per_node: int
    between: Link
    within: Link | None = None
    """Link within a node; None (no cost) if a node has one rank or the link is
    unknown."""
    trees: bool = True
    """True if all-reduces may use a tree, as with NCCL; gloo only has rings."""
    all_reduce_factor: float = 1.0
    """Measured over predicted time of all-reduces over several nodes of several
    ranks."""

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """The gradient of one parameter, or of several that are ready together."""

    elements: int
    ready_share: float
    """Share of backward after which it may be synchronised, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompute:
    """Cost of a step on a rank without synchronisation.

    The other ranks of its node compute as well.
    """

    sequence_s: float
    """Time of forward and backward for each sequence of a micro-batch."""
    micro_batch_s: float
    """Constant part of a micro-batch's forward and backward time."""
    optimizer_step_s: float
    """Time of clipping and the optimizer per step, with all optimizer state on this
    rank."""
    gradients: tuple[GradientPart, ...]
    """Gradients in the order in which they are ready."""
    forward_share: float = 1 / 3
    """Forward's share of forward and backward; a third without checkpointing, as
    backward has twice the matmuls."""
    jitter_share: float = 0.0
    """Standard deviation of one rank's time for a micro-batch, as share of that
    time."""
    slowdown_share: float = 0.0
    """Share of compute lost during transfers of gradients."""

    @property
    def elements(self) -> int:
        """Number of elements of all gradients."""
        return sum(part.elements for part in self.gradients)

    def forward_backward_s(self, rows: float) -> float:
        """Return the time of a micro-batch's forward and backward, by sequences."""
        return self.micro_batch_s + rows * self.sequence_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSync:
    """Gradient synchronisation: parallel strategy, dtype and buckets."""

    strategy: Strategy = "ddp"
    gradient_dtype: GradientDtype = "fp32"
    bucket_cap_bytes: int = 25 * MIB
    shard_within_nodes: bool = False
    """True with ``fsdp2`` if each node holds one copy of the model (HSDP), rather than
    all nodes together."""

    @property
    def element_bytes(self) -> int:
        """Bytes of a gradient element that is sent."""
        return ELEMENT_BYTES[self.gradient_dtype]

    @property
    def name(self) -> str:
        """Name in tables, such as ``ddp, fp32, 25 MiB buckets``."""
        kind = "hsdp" if self.shard_within_nodes else self.strategy
        cap = (
            ""
            if self.strategy == "fsdp2"
            else f", {self.bucket_cap_bytes // MIB} MiB buckets"
        )
        return f"{kind}, {self.gradient_dtype}{cap}"

    def settings(self, ranks_per_node: int) -> dict[str, Any]:
        """Return the settings of ``[train.parallel]`` that it decides."""
        return {
            "strategy": self.strategy,
            "shard_ranks": ranks_per_node if self.shard_within_nodes else None,
            "bucket_cap_mib": self.bucket_cap_bytes // MIB,
            "gradient_dtype": self.gradient_dtype,
        }


class LinkEvidence(StrictTable):
    """One kind of link, fitted to all-reduces of many sizes.

    Bounds are at 98 % confidence.
    """

    scope: Scope
    members: Annotated[int, Field(ge=2)]
    """Number of measured ranks of a node, or of nodes."""
    latency_s: NonNegativeFloat
    """Latency of one hop."""
    latency_s_low: NonNegativeFloat | None = None
    latency_s_high: NonNegativeFloat | None = None
    bytes_per_s: PositiveFloat
    bytes_per_s_low: NonNegativeFloat | None = None
    bytes_per_s_high: NonNegativeFloat | None = None
    worst_error_share: NonNegativeFloat
    """Largest relative error of the fitted line at the sizes that determine the
    bandwidth."""

    @property
    def link(self) -> Link:
        """Link with the fitted latency and bandwidth."""
        return Link(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s)

    @property
    def ends(self) -> tuple[Link, Link] | None:
        """Links at the worse and at the better end of the bounds.

        They are None without bounds.
        """
        slow, fast = self.bytes_per_s_low, self.bytes_per_s_high
        late, early = self.latency_s_high, self.latency_s_low
        if slow is None or fast is None or late is None or early is None:
            return None
        return Link(latency_s=late, bytes_per_s=slow), Link(
            latency_s=early, bytes_per_s=fast
        )


class ComputeEvidence(StrictTable):
    """Cost of a step on a rank while all ranks compute.

    No gradient is synchronised.
    """

    micro_batch_size: PositiveInt
    micro_batch_s: PositiveFloat
    """Time of forward and backward of a micro-batch of ``micro_batch_size``
    sequences."""
    fixed_s: NonNegativeFloat
    """Part of ``micro_batch_s`` that does not grow with the number of sequences."""
    optimizer_step_s: NonNegativeFloat
    """Time of clipping and the optimizer."""
    forward_share: Annotated[float, Field(gt=0, lt=1)]
    """Share of a micro-batch's time that is forward."""
    jitter_share: NonNegativeFloat
    """Standard deviation of one rank's compute time, as share of that time."""
    slowdown_share: Share
    """Share of compute lost during transfers of gradients."""
    gradient_elements: list[PositiveInt]
    """Elements of gradients in the order in which they are ready, small ones merged."""
    gradient_ready_shares: list[Share]
    """Share of backward after which each gradient is ready."""

    @property
    def of_rank(self) -> RankCompute:
        """Cost of a step on a rank for any number of sequences."""
        parts = zip(self.gradient_elements, self.gradient_ready_shares, strict=True)
        return RankCompute(
            sequence_s=(self.micro_batch_s - self.fixed_s) / self.micro_batch_size,
            micro_batch_s=self.fixed_s,
            optimizer_step_s=self.optimizer_step_s,
            gradients=tuple(
                GradientPart(elements=elements, ready_share=ready)
                for elements, ready in parts
            ),
            forward_share=self.forward_share,
            jitter_share=self.jitter_share,
            slowdown_share=self.slowdown_share,
        )


class GradientSyncSplit(StrictTable):
    """A gradient synchronisation with its batch split.

    It is named as in ``train.parallel``.
    """

    strategy: Strategy
    shard_ranks: PositiveInt | None = None
    gradient_dtype: GradientDtype
    bucket_cap_mib: PositiveInt
    gradient_accumulation_steps: PositiveInt
    """Micro-batches of an optimizer step, on each rank."""
    micro_batch_size: PositiveInt
    added_micro_batches: NonNegativeInt = 0
    """Micro-batches of a measured step whose time was predicted."""

    @property
    def sync(self) -> GradientSync:
        """Gradient synchronisation without the batch split."""
        return GradientSync(
            strategy=self.strategy,
            gradient_dtype=self.gradient_dtype,
            bucket_cap_bytes=self.bucket_cap_mib * MIB,
            shard_within_nodes=self.shard_ranks is not None,
        )


class GradientSyncRow(GradientSyncSplit, RatioBounds):
    """A gradient synchronisation with its predicted and measured times."""

    predicted_step_s: PositiveFloat | None = None
    """Step time predicted before the measurement."""
    step_s: PositiveFloat | None = None
    """Median step time, measured; None if it did not run."""
    steps: NonNegativeInt
    tokens_per_s: NonNegativeFloat | None = None
    """Non-padding tokens/s of all ranks."""
    compute_share: Share | None = None
    """Share of the step in which a rank computes."""
    communication_share: Share | None = None
    """Share of the step in which ranks waited for gradients or weights."""
    peak_bytes: PositiveInt | None = None
    """Peak memory of the rank that needed most."""
    ratio_to_default: PositiveFloat | None = None
    """Non-padding tokens/s over the default's, round by round; None for the default,
    and if a round is missing."""
    outcome: str

    @property
    def ratio(self) -> Interval | None:
        """Ratio to the default with its bounds; None if there is none."""
        return (
            None
            if self.ratio_to_default is None
            else self.bounded(self.ratio_to_default)
        )


class ScalingRow(GradientSyncSplit):
    """Training with the same global batch on a number of nodes."""

    nodes: PositiveInt
    step_s: PositiveFloat
    tokens_per_s: PositiveFloat
    """Non-padding tokens/s of all nodes."""
    efficiency: PositiveFloat
    """Throughput relative to perfect scaling from one node."""
    efficiency_low: NonNegativeFloat | None = None
    """Efficiency at the worse end of the links' intervals."""
    efficiency_high: NonNegativeFloat | None = None
    limit: str
    """Largest cost beside compute, or compute if nothing else costs 1 % of the step."""
    limit_share: Share | None = None
    """Share of the step that ``limit`` costs; None if it is negligible, or the step was
    measured."""
    measured: bool


GradientBytesFrom = Literal["optimizers", "parameters", "not known"]
"""Origin of the size of gradients: what torch's optimizers hold after a step, or the
probe's parameters in fp32."""


class StepOnRanks(StrictTable):
    """A step on one rank and on all ranks: the cost of synchronisation from outside.

    Each rank keeps its size, so that all ranks together do more.
    """

    size: PositiveInt
    """Value of the searched argument, on each rank."""
    unit: str
    """Unit of throughput, as a plural."""
    units_per_step: PositiveFloat
    """Units of a step on one rank."""
    one_rank_step_s: list[PositiveFloat]
    """Median step time of each round, on one rank."""
    all_ranks_step_s: list[PositiveFloat]
    """Median step time of each round, on all ranks, of the slowest."""
    added_s: float
    """Time that a step takes longer on all ranks: synchronisation that does not
    overlap, waits for slower ranks, and whatever ranks share, such as CPU cores."""
    efficiency: PositiveFloat
    """Step time on one rank over that on all ranks, round by round."""
    efficiency_low: NonNegativeFloat | None = None
    """Lower 98 % confidence bound of the efficiency."""
    efficiency_high: NonNegativeFloat | None = None
    """Upper 98 % confidence bound of the efficiency."""
    gradient_bytes: PositiveInt | None = None
    """Size of all gradients; None if it is not known."""
    gradient_bytes_from: GradientBytesFrom
    """Origin of ``gradient_bytes``."""
    all_reduce_s: NonNegativeFloat | None = None
    """Predicted time of an all-reduce of all gradients over the measured links; None if
    their size is not known."""


class NodesRow(StrictTable):
    """Predicted step of a subject on a number of nodes, with its size on each rank."""

    nodes: PositiveInt
    """Number of nodes."""
    step_s: PositiveFloat
    """Step time."""
    units_per_s: PositiveFloat
    """Units/s of all nodes."""
    efficiency: PositiveFloat
    """Step time on one rank over this one."""


class NetworkEvidence(StrictTable):
    """Links between ranks, their cost in a step, and the number of useful nodes."""

    nodes: PositiveInt
    ranks_per_node: PositiveInt
    backend: str
    """``nccl`` with its version, or ``gloo``."""
    interface: str | None = None
    interface_bytes_per_s: PositiveInt | None = None
    """Nominal speed, as the interface reports it."""
    transport: str
    """Transport of messages, or the reason why it is unknown."""
    links: list[LinkEvidence]
    all_reduce_factor: PositiveFloat = 1.0
    """Measured over predicted time of all-reduces over all ranks; 1 if it was not
    measured."""
    warnings: list[str] = Field(default_factory=list)
    """Warnings about slow links, slow ranks, or an interface below its nominal
    speed."""
    matmul_flops_per_s: list[NonNegativeFloat]
    """Matmul FLOP/s of each rank while all ranks compute."""
    default_micro_batch_size: PositiveInt | None = None
    """Probed micro-batch size, used by the default; None for code of yours."""
    compute: ComputeEvidence | None = None
    """Cost of a step without synchronisation; None for code of yours, whose
    synchronisation cannot be switched off."""
    gradient_syncs: list[GradientSyncRow] = Field(default_factory=list)
    """Gradient synchronisations that were tried; empty for code of yours, which has its
    own."""
    on_ranks: StepOnRanks | None = None
    """Cost of synchronisation of code of yours, from outside; None for the bundled
    trainer."""
    scaling: list[ScalingRow] = Field(default_factory=list)
    useful_nodes: PositiveInt | None = None
    """Largest number of nodes that is at least 90 % efficient at this global batch;
    predicted."""
    levers: list[str] = Field(default_factory=list)
    """Changes that raise the number of useful nodes."""
    choice: str
    equal_loss: str | None = None
    """Result of a check of 16-bit gradients against 32-bit ones; None if there was
    none."""
    windows: NonNegativeInt
    seconds: NonNegativeFloat
