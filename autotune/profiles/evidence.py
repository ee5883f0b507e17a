"""The evidence of a profile: what was measured or predicted for each decision, as tables of the profile."""

from typing import Annotated, Literal

from pydantic import Field

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.search.values import (
    ExploreEvidence,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RatioBounds,
)
from autotune.network.values import MIB, Exchange, GradientPart, Link, RankCompute, Scope
from autotune.trials.values import GpuUse, Share
from trainer.config.train_config import GradientDtype, Strategy
from trainer.config.tables import Table

SettingValue = str | int | float | bool | None
RecipeName = Literal["paper", "hf-trainer", "tuned"]


class CurvePoint(Table):
    """Throughput at one micro-batch."""

    rows: Positive
    slot_tokens_per_s: PositiveFloat
    """All rows full."""
    step_s: PositiveFloat
    """Median of the timed optimizer steps, one micro-batch each."""
    timed_steps: Positive
    slot_tokens_per_s_low: PositiveFloat | None = None
    """95 % confidence bounds; None if the timed steps show no spread that could be trusted."""
    slot_tokens_per_s_high: PositiveFloat | None = None

    @property
    def slot_rate(self) -> Interval:
        """Slot tokens/s with their bounds."""
        low, high = self.slot_tokens_per_s_low, self.slot_tokens_per_s_high
        return Interval.of(self.slot_tokens_per_s, low, high, SHOWN_CONFIDENCE)


class ProbeEvidence(Table):
    """Which micro-batch fits, and which one is used."""

    feasible_max: Positive
    """The largest micro-batch, in rows, that ran optimizer steps under the budget."""
    infeasible_min: Positive | None = None
    """The smallest that was refused; None when the search met its own upper limit first."""
    feasible_peak_bytes: Positive
    """What ``feasible_max`` needed."""
    predicted_peak_bytes: Positive | None = None
    """For ``feasible_max``, by the trace as smaller trials corrected it; without a trace by a line through two."""
    traced_peak_bytes: Positive | None = None
    """The same before any trial; None where the model was not traced."""
    traced_rows: NonNegative | None = None
    """The largest micro-batch that the trace alone predicted."""
    traced_terms_bytes: dict[str, int] = Field(default_factory=dict)
    """Where the trace says that the memory of ``feasible_max`` goes."""
    parameters: Positive | None = None
    not_traced: str | None = None
    """Why there is no trace."""
    local_ranks: Positive = 1
    """Ranks that took the steps together, each under the budget."""
    micro_batches_per_step: Positive = 1
    """With two, which stand for any number above, gradients exist while the next micro-batch is computed."""
    search_trials: Positive
    """Trials until both sides were proven; the throughput curve took further ones."""
    seconds: NonNegativeFloat
    """The curve's included."""
    mean_real_tokens_per_row: PositiveFloat
    """Of this dataset, in this layout."""
    curve: list[CurvePoint]
    knee_rows: list[Positive] = Field(default_factory=list)
    """Between which two sizes the knee of the curve lies, for all that the noise tells."""
    sustained: CurvePoint | None = None
    """The chosen micro-batch over a minute, warm and at the power limit: what is promised; over less if a trial's time
    limit is below 4 minutes. None on a CPU."""
    choice: str
    """Why ``micro_batch_rows`` is what it is."""

    def promised(self, rows: int) -> CurvePoint | None:
        """Return the throughput to expect of a micro-batch; None if it was not measured."""
        if self.sustained is not None and self.sustained.rows == rows:
            return self.sustained
        return next((point for point in self.curve if point.rows == rows), None)


class WorkersRow(RatioBounds):
    """What windows with one number of loader workers say."""

    loader_workers: NonNegative
    """For each rank."""
    slot_tokens_per_s: list[float]
    """One figure per window, of all local ranks; a step costs the same whatever its sequences hold."""
    ratio_to_ceiling: PositiveFloat
    """To the same step on batches from memory, windows of the same round against each other."""
    verdict: Literal["proven", "refuted", "open"]
    data_wait_share: Share
    """Median; of the time, that devices waited for data, all local ranks' added up."""
    model_flops_per_s_per_rank: list[NonNegativeFloat] = Field(default_factory=list)
    """One figure per window: what the mathematics of the real tokens asks for; empty where the step was replayed."""
    memory_bytes: Positive | None = None
    """Largest; of all local ranks and their workers."""
    storage_bytes_per_s: NonNegativeFloat | None = None
    """Median; read from storage rather than from memory."""
    gpu: GpuUse | None = None

    @property
    def ratio(self) -> Interval:
        """The ratio to batches from memory with its bounds."""
        return self.bounded(self.ratio_to_ceiling)


class JointChoice(RatioBounds):
    """What a search over workers, prefetching and pinning together found, where workers alone left a gap."""

    trials: Positive
    loader_workers: NonNegative
    prefetch_batches: Positive
    pin_memory: bool
    ratio_to_workers_alone: PositiveFloat
    """Throughput, window by window."""
    adopted: bool
    """Whether it was proven to be faster, and is what the profile says."""

    @property
    def ratio(self) -> Interval:
        """The ratio to workers alone with its bounds."""
        return self.bounded(self.ratio_to_workers_alone)


class WorkersEvidence(Table):
    """How many loader workers are enough."""

    chosen: NonNegative
    """For each rank."""
    undecided_between: list[NonNegative] = Field(default_factory=list)
    """The fewest and the most that it may be; empty when it is decided."""
    choice: str
    refusal: str | None = None
    """What is known of the next smaller count that was measured."""
    fed: bool
    """Whether the chosen count keeps the step supplied with data."""
    ceiling_slot_tokens_per_s: list[float]
    """The same step on batches that already lie in memory."""
    rows: list[WorkersRow]
    joint: JointChoice | None = None
    local_ranks: Positive
    max_workers: NonNegative
    max_workers_because: str
    consumer: str
    """What took the batches: the training step, or a replay of one."""
    replayed_step_s: PositiveFloat | None = None
    """Of a micro-batch, where the step was a replay."""
    window_s: PositiveFloat
    """Least time of a window."""
    windows: Positive
    seconds: NonNegativeFloat
    data_filesystem: str | None = None
    data_on_network: bool = False
    """Whether the file system is another machine's, and others use it too."""
    gpu_source: str
    """Where the GPU's figures come from, or why there are none."""
    operating_state: str | None = None
    """Power, clocks and power cap of the GPU while the step is fed from memory."""


class LinkEvidence(Table):
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


class ComputeEvidence(Table):
    """What a step costs a rank while all ranks compute and no gradient travels."""

    rows: Positive
    micro_batch_s: PositiveFloat
    """Forward and backward of a micro-batch of so many rows."""
    fixed_s: NonNegativeFloat
    """Part of it that does not grow with the rows."""
    update_s: NonNegativeFloat
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
            row_s=(self.micro_batch_s - self.fixed_s) / self.rows,
            micro_batch_s=self.fixed_s,
            update_s=self.update_s,
            gradients=tuple(GradientPart(elements=elements, ready_share=ready) for elements, ready in parts),
            forward_share=self.forward_share,
            jitter_share=self.jitter_share,
            slowdown_share=self.slowdown_share,
        )


class ExchangeSplit(Table):
    """One way to exchange gradients, named as in ``train.parallel``, and how it splits the global batch."""

    strategy: Strategy
    shard_ranks: Positive | None = None
    gradient_dtype: GradientDtype
    bucket_cap_mib: Positive
    micro_batches: Positive
    """Of an optimizer step, on each rank."""
    rows: Positive
    """Of a micro-batch."""
    added_micro_batches: NonNegative = 0
    """Of a measured step, which were not measured but added as predicted."""

    @property
    def exchange(self) -> Exchange:
        """How gradients are exchanged."""
        return Exchange(
            strategy=self.strategy,
            gradient_dtype=self.gradient_dtype,
            bucket_cap_bytes=self.bucket_cap_mib * MIB,
            shard_within_nodes=self.shard_ranks is not None,
        )


class ExchangeRow(ExchangeSplit, RatioBounds):
    """One way to exchange gradients: what it was predicted to take, and took."""

    predicted_step_s: PositiveFloat | None = None
    """Before it was measured."""
    step_s: PositiveFloat | None = None
    """Median; None where it did not run."""
    steps: NonNegative
    real_tokens_per_s: NonNegativeFloat | None = None
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


class ScalingRow(ExchangeSplit):
    """Training the same global batch on so many nodes."""

    nodes: Positive
    step_s: PositiveFloat
    real_tokens_per_s: PositiveFloat
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


class NetworkEvidence(Table):
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
    products_flops_per_s: list[NonNegativeFloat]
    """Of each rank while all multiply matrices."""
    default_rows: Positive | None = None
    """The micro-batch as probed, which the default exchange has; None where no training step was measured."""
    compute: ComputeEvidence | None = None
    exchanges: list[ExchangeRow] = Field(default_factory=list)
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


class SettingDifference(Table):
    """A setting in which a recipe differs from the tuned one, or that it could not choose itself."""

    key: str
    """Dotted, without ``train``: ``data.loader_workers``."""
    theirs: SettingValue = None
    """None where it is unset."""
    tuned: SettingValue = None
    reason: str | None = None
    """Why it is theirs, where the recipe had no choice."""


class RecipeRow(Table):
    """One way to train the same model on the same data, by the same trainer."""

    name: RecipeName
    differences: list[SettingDifference] = Field(default_factory=list)
    """From the tuned settings, in what bears on speed."""
    real_tokens_per_s: list[PositiveFloat]
    """One figure per window, of all local ranks; empty where it did not run."""
    speedup: PositiveFloat | None = None
    """Tuned real tokens/s over theirs, of windows of the same round; None where it did not run."""
    speedup_low: PositiveFloat | None = None
    """95 % confidence bounds; None where too few windows show a spread."""
    speedup_high: PositiveFloat | None = None
    data_wait_share: Share | None = None
    outcome: str
    """``ran``, or why it did not."""

    @property
    def bounded_speedup(self) -> Interval | None:
        """The speedup with its bounds; None where it did not run."""
        known = self.speedup
        return None if not known else Interval.of(known, self.speedup_low, self.speedup_high, SHOWN_CONFIDENCE)


class BaselineEvidence(Table):
    """What the tuned settings are worth: the same training as others would set it up."""

    rows: list[RecipeRow]
    local_ranks: Positive
    window_s: PositiveFloat
    windows: Positive
    seconds: NonNegativeFloat


class Evidence(Table):
    """What was measured; a missing part was not."""

    probe: ProbeEvidence | None = None
    explore: ExploreEvidence | None = None
    workers: WorkersEvidence | None = None
    network: NetworkEvidence | None = None
    baseline: BaselineEvidence | None = None
