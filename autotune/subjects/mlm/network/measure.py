"""Measurement of links and training steps across ranks.

It finds the fastest gradient synchronisation at the global batch. Candidates are
predicted from links and from steps without synchronisation; the best ones are measured
in rounds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.base.interval import Interval
from autotune.base.window_statistics import paired_ratio
from autotune.errors import BadInput, OutOfTime
from autotune.evidence.network import (
    MIB,
    ComputeEvidence,
    GradientSync,
    GradientSyncRow,
    Network,
    RankCompute,
    ScalingRow,
)
from autotune.network.decide.scaling_model import (
    Load,
    PredictedStep,
    ScalingModel,
    gradient_syncs,
    predict,
)
from autotune.network.decide.step_model import (
    compute_of,
    computed_s,
    step_time,
)
from autotune.network.link_measurement import MeasuredLinks, measure_links
from autotune.profiles.decide.batch_split import GlobalBatchSplit, split_global_batch
from autotune.subjects.mlm.gradient_sync import GradientSyncRequest
from autotune.trials.decide.equal_loss import (
    CHECK_WARM_UP_STEPS,
    LOSS_STEPS,
    check_loss,
)
from autotune.trials.job_figures import GradientSyncFigures
from autotune.trials.outcomes import Measured, Outcome, describe
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial, TrialRequest
from trainer.formats.train_config import GradientDtype, ParallelSettings, TrainConfig

COMPUTE_STEPS, SYNC_STEPS = 8, 6
MOST_MICRO_BATCHES = 4
"""Limit of micro-batches in a measured step; the time of further ones is predicted."""
CANDIDATES = 4
ROUNDS = 3
"""Rounds of windows; fewer cannot decide, because steps of one start of the ranks are
correlated."""
WORTHWHILE_SHARE = 0.01
"""Least gain for which a candidate replaces the default."""
HALVED_WORTH_SHARE = 0.03
"""Least predicted gain for which 16-bit gradients are checked and measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """Request to tune gradient synchronisation."""

    config: TrainConfig
    """Trainer settings as probed; their global batch is kept."""
    data_dir: str
    nodes: int
    ranks_per_node: int
    max_micro_batch_size: int
    """Largest micro-batch size that leaves the headroom free."""
    tokens_per_sequence: float
    budget_s: float
    trial_timeout_s: float
    strategies: Sequence[str] = ("ddp", "zero1", "hsdp", "fsdp2")

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def half(self) -> GradientDtype:
        """16-bit dtype in which gradients can be synchronised: gloo has no bf16."""
        return "bf16" if self.config.device == "cuda" else "fp16"


@dataclass(slots=True, kw_only=True)
class MeasuredGradientSync:
    """A candidate with its measurements."""

    candidate: PredictedStep
    non_padding_tokens: float
    """Non-padding tokens of the global batch."""
    further_s: float
    """Predicted time of micro-batches beyond the four of a measured step."""
    figures: list[GradientSyncFigures] = field(default_factory=list)
    outcome: str = "not measured"

    @property
    def step_s(self) -> float | None:
        """Median step time with all micro-batches of the global batch.

        It is None without measurements.
        """
        steps = [
            second + self.further_s for one in self.figures for second in one.step_s
        ]
        return statistics.median(steps) if steps else None

    def rates(self) -> list[float]:
        """Return non-padding tokens/s of the median step of each round."""
        return [
            self.non_padding_tokens / (statistics.median(one.step_s) + self.further_s)
            for one in self.figures
        ]

    def evidence(self, ranks_per_node: int, ratio: Interval | None) -> GradientSyncRow:
        """Return the candidate's row in the profile."""
        step_s = self.step_s
        waits = [
            figures.communication_s
            for figures in self.figures
            if figures.communication_s is not None
        ]
        waiting = (
            None
            if step_s is None or not waits
            else min(1.0, statistics.median_high(waits) / step_s)
        )
        further = max(
            0, self.candidate.split.gradient_accumulation_steps - MOST_MICRO_BATCHES
        )
        return GradientSyncRow(
            **self.candidate.settings(ranks_per_node),
            predicted_step_s=self.candidate.time.step_s,
            step_s=step_s,
            steps=sum(len(figures.step_s) for figures in self.figures),
            outcome=self.outcome,
            tokens_per_s=None if step_s is None else self.non_padding_tokens / step_s,
            compute_share=None if waiting is None else 1 - waiting,
            communication_share=waiting,
            peak_bytes=max(
                (figures.peak_bytes for figures in self.figures if figures.peak_bytes),
                default=None,
            ),
            added_micro_batches=further if self.figures else 0,
            ratio_to_default=ratio.value if ratio else None,
            ratio_low=ratio.low if ratio else None,
            ratio_high=ratio.high if ratio else None,
        )


@dataclass(slots=True, kw_only=True)
class NetworkTuning:
    """A network tuning in progress."""

    request: NetworkRequest
    runner: TrialRunner
    links: MeasuredLinks | None = None
    compute: ComputeEvidence | None = None
    tried: list[MeasuredGradientSync] = field(default_factory=list)
    """Candidates that were measured, the default first."""
    reading: Rounds = field(init=False)
    equal_loss: str | None = None
    slowdown_share: float = 0.0

    def __post_init__(self) -> None:
        self.reading = Rounds(runner=self.runner)

    def run(self) -> None:
        """Measure all that the choice of a gradient synchronisation needs.

        It measures links, steps without synchronisation, the loss if 16 bits may pay,
        and the best candidates.
        """
        self.measure_links()
        self.measure_compute()
        plain, halved = (
            self.candidates(sixteen_bit=sixteen_bit) for sixteen_bit in (False, True)
        )
        plain_s, halved_s = (
            min(one.time.step_s for one in group) for group in (plain, halved)
        )
        # 16 bits change the recipe and their check takes minutes, so they must pay.
        worth = halved_s < (1 - HALVED_WORTH_SHARE) * plain_s
        self.measure(halved if worth and self.check_loss() else plain)

    def measure_links(self) -> None:
        """Measure all-reduces and matmuls."""
        asked = self.request
        self.links = measure_links(
            self.reading,
            asked.config.device,
            nodes=asked.nodes,
            ranks_per_node=asked.ranks_per_node,
            timeout_s=asked.trial_timeout_s,
            data_dir=asked.data_dir,
        )
        self.slowdown_share = self.links.figures.slowdown_share

    def network(self) -> Network:
        """Return the measured network."""
        assert self.links is not None
        return self.links.network

    def measure_compute(self) -> None:
        """Measure steps without synchronisation.

        They have the profile's micro-batch size, and half of it.
        """
        rows = self.request.config.micro_batch_size
        whole = self.steps(rows)
        fixed_s, whole_s = 0.0, computed_s(whole)
        if rows > 1:
            sequence_s = (whole_s - computed_s(self.steps(rows // 2))) / (
                rows - rows // 2
            )
            fixed_s = min(max(0.0, whole_s - rows * sequence_s), whole_s)
        self.compute = compute_of(whole, fixed_s)

    def load(self) -> Load:
        """Return the workload: the measured compute and the global batch."""
        assert self.compute is not None
        asked, compute = (
            self.request,
            replace(self.compute.of_rank, slowdown_share=self.slowdown_share),
        )
        return Load(
            compute=compute,
            global_batch_size=asked.config.global_batch_size,
            tokens_per_sequence=asked.tokens_per_sequence,
            max_micro_batch_size=asked.max_micro_batch_size,
        )

    def candidates(self, *, sixteen_bit: bool) -> list[PredictedStep]:
        """Return the default, then the predicted best of each strategy and dtype.

        The latter are ordered, the fastest first.
        """
        load, network, default = self.load(), self.network(), self.default()
        by_kind: dict[tuple[str, str, bool], PredictedStep] = {}
        two_levels = self.request.nodes > 1 and self.request.ranks_per_node > 1
        strategies = [
            one for one in self.request.strategies if one != "hsdp" or two_levels
        ]
        for one in gradient_syncs(
            sixteen_bit=sixteen_bit, strategies=strategies, half=self.request.half
        ):
            predicted, kind = (
                predict(load, network, one),
                (one.strategy, one.gradient_dtype, one.shard_within_nodes),
            )
            before = by_kind.get(kind)
            if predicted and (
                before is None or predicted.time.step_s < 0.995 * before.time.step_s
            ):
                by_kind[kind] = predicted
        ranked = sorted(by_kind.values(), key=lambda one: one.time.step_s)
        # One of each strategy is kept, for the report.
        fastest = {one.sync.strategy: one for one in reversed(ranked)}
        kept = [
            one
            for number, one in enumerate(ranked)
            if number < CANDIDATES or one is fastest[one.sync.strategy]
        ]
        same = default.sync, default.split
        return [default, *(one for one in kept if (one.sync, one.split) != same)]

    def default(self) -> PredictedStep:
        """Return the trainer's default: DDP at the probed micro-batch size."""
        config = self.request.config
        sync = GradientSync(bucket_cap_bytes=ParallelSettings().bucket_cap_mib * MIB)
        split = split_global_batch(
            config.global_batch_size, config.micro_batch_size, self.request.ranks
        )
        found = predict(self.load(), self.network(), sync, [split])
        assert found is not None
        return found

    def check_loss(self) -> bool:
        """Train with 32-bit and 16-bit gradients from the same start.

        Returns:
            True if the losses match.
        """
        default, half = self.default(), self.request.half
        names = "fp32 gradients", f"{half} gradients"

        def train(name: str) -> Outcome:
            sync = replace(
                default.sync, gradient_dtype="fp32" if name == names[0] else half
            )
            trial = self._trial(
                sync, default.split, LOSS_STEPS, warmup_steps=CHECK_WARM_UP_STEPS
            )
            return self.reading.measure_window(
                trial, f"equal loss, {sync.gradient_dtype}"
            )

        verdict = check_loss(names, train)
        self.equal_loss = verdict.message
        return verdict.equal

    def measure(self, candidates: Sequence[PredictedStep]) -> None:
        """Measure rounds of all candidates that still run.

        It ends when the budget is used up or three rounds are done.
        """
        load, network = self.load(), self.network()
        further = [
            further_s(load.compute, one.split, one.sync, network) for one in candidates
        ]
        self.tried = [
            MeasuredGradientSync(
                candidate=one,
                non_padding_tokens=load.non_padding_tokens,
                further_s=more_s,
            )
            for one, more_s in zip(candidates, further, strict=True)
        ]
        try:
            for number in range(ROUNDS):
                if not number or self.runner.seconds < self.request.budget_s:
                    self._measure_round(number)
        except OutOfTime:
            if not self.tried[0].figures:
                raise
        # The default's steps show how much transfers slow compute down beyond the
        # prediction.
        step_s, split, sync = (
            self.tried[0].step_s,
            candidates[0].split,
            candidates[0].sync,
        )
        alone, rows = replace(load.compute, slowdown_share=0.0), split.micro_batch_size
        time = step_time(alone, rows, split.gradient_accumulation_steps, sync, network)
        if step_s is not None and (hidden_s := time.sync_s - time.exposed_s) > 0:
            self.slowdown_share = min(0.5, max(0.0, (step_s - time.step_s) / hidden_s))

    def _measure_round(self, number: int) -> None:
        """Measure steps of all candidates that ran in the round before."""
        going = [one for one in self.tried if not number or one.figures]
        trials = {
            place: (
                self._trial(one.sync, one.split, SYNC_STEPS, number),
                f"round {number + 1}: {one.sync.name}",
            )
            for place, one in enumerate(one.candidate for one in going)
        }

        def check(place: int, outcome: Outcome, seconds: float) -> None:
            going[place].outcome = describe(outcome)
            if going[place] is self.tried[0]:
                self.runner.require_measured(
                    "the default gradient synchronisation", outcome
                )

        def refuse(place: int, error: BadInput) -> None:
            going[place].outcome = f"rejected: {error.message}"

        for place, outcome in self.reading.measure_round(
            number, trials, check, refuse
        ).items():
            if isinstance(outcome, Measured):
                going[place].figures.append(GradientSyncFigures.of(outcome))

    def fastest(self) -> tuple[MeasuredGradientSync, Interval | None]:
        """Return the fastest candidate, and its ratio to the default.

        It is the one with the largest verified gain over the default, or else the
        default.
        """
        ratios = [(one, self.against_default(one)) for one in self.tried[1:]]
        least = 1 + WORTHWHILE_SHARE
        faster = [
            (one, by)
            for one, by in ratios
            if by is not None and by.value >= least and (by.low or 0.0) > 1.0
        ]
        return (
            max(faster, key=lambda found: found[1].value)
            if faster
            else (self.tried[0], None)
        )

    def micro_batch_size(self, candidate: PredictedStep) -> int:
        """Return the largest micro-batch size that gives the candidate's batch split.

        It is the probed size if that gives the same split.
        """
        # The largest one, because the profile is also used with other numbers of ranks.
        asked, config, split = self.request, self.request.config, candidate.split
        sizes: list[int] = [
            config.micro_batch_size,
            *range(asked.max_micro_batch_size, split.micro_batch_size - 1, -1),
        ]
        return next(
            rows
            for rows in sizes
            if split_global_batch(config.global_batch_size, rows, asked.ranks) == split
        )

    def against_default(self, one: MeasuredGradientSync) -> Interval | None:
        """Return non-padding tokens/s over the default's, round by round.

        Returns:
            The ratio with its interval, or None if a round is missing.
        """
        pairs = list(zip(one.rates(), self.tried[0].rates(), strict=False))
        return paired_ratio(pairs) if len(pairs) == ROUNDS else None

    def steps(
        self,
        rows: int,
        micro_batches: int = 1,
        sync: GradientSync | None = None,
        *,
        steps: int = COMPUTE_STEPS,
        number: int = 0,
    ) -> GradientSyncFigures:
        """Measure steps with a gradient synchronisation.

        Without ``sync``, they are steps of one micro-batch without synchronisation.
        """
        label = f"micro-batch {rows}, no synchronisation" if sync is None else sync.name
        split = split_global_batch(
            rows * micro_batches * self.request.ranks, rows, self.request.ranks
        )
        trial = self._trial(
            sync or GradientSync(), split, steps, number, synchronise=sync is not None
        )
        outcome = self.reading.measure_window(trial, label)
        return GradientSyncFigures.of(
            self.runner.require_measured(f"the step '{label}'", outcome)
        )

    def _trial(
        self,
        sync: GradientSync,
        split: GlobalBatchSplit,
        steps: int,
        number: int = 0,
        *,
        synchronise: bool = True,
        **train: object,
    ) -> Trial:
        micro_batches, settings = (
            min(MOST_MICRO_BATCHES, split.gradient_accumulation_steps),
            self.request.config,
        )
        parallel = parallel_settings(sync, self.request.ranks_per_node)
        changes: dict[str, object] = {
            "micro_batch_size": split.micro_batch_size,
            "global_batch_size": (
                split.micro_batch_size * micro_batches * self.request.ranks
            ),
            "global_batch_tokens": None,
            "global_batch_samples": None,
            "max_epochs": None,
            "parallel": settings.parallel.model_copy(update=parallel),
        }
        config = settings.model_copy(update=changes | train)
        return self._asked(
            GradientSyncRequest,
            config=config,
            steps=steps,
            synchronise=synchronise,
            round=number,
        )

    def _asked(self, kind: type[TrialRequest], **fields: object) -> Trial:
        asked = kind.model_validate(
            fields
            | {
                name: getattr(self.request, name)
                for name in ("nodes", "ranks_per_node")
            }
        )
        return asked.trial(
            timeout_s=self.request.trial_timeout_s, data_dir=self.request.data_dir
        )


def parallel_settings(sync: GradientSync, ranks_per_node: int) -> dict[str, Any]:
    """Return the settings of ``[train.parallel]`` for a gradient synchronisation."""
    return sync.settings(ranks_per_node) | (
        {"static_graph": False} if sync.strategy == "fsdp2" else {}
    )


def further_s(
    compute: RankCompute, split: GlobalBatchSplit, sync: GradientSync, network: Network
) -> float:
    """Return the predicted time of a step's micro-batches that are not measured.

    It includes transfers of weights.
    """
    counts = (
        split.gradient_accumulation_steps,
        min(MOST_MICRO_BATCHES, split.gradient_accumulation_steps),
    )
    whole, part = (
        step_time(compute, split.micro_batch_size, count, sync, network)
        for count in counts
    )
    return whole.step_s - part.step_s


def measured_row(
    tuning: NetworkTuning, known: ScalingModel, row: ScalingRow, steps: int
) -> ScalingRow:
    """Measure at most four micro-batches of a row's step.

    The predicted time of further ones is added.
    """
    split = split_global_batch(
        known.load.global_batch_size, row.micro_batch_size, tuning.request.ranks
    )
    sync = (
        row.sync
        if row.gradient_dtype == "fp32"
        else replace(row.sync, gradient_dtype=tuning.request.half)
    )
    figures = tuning.steps(
        row.micro_batch_size, row.gradient_accumulation_steps, sync, steps=steps
    )
    further = further_s(
        known.load.compute, split, sync, replace(known.network, nodes=row.nodes)
    )
    step_s = statistics.median(figures.step_s) + further
    update = {
        "step_s": step_s,
        "tokens_per_s": known.load.non_padding_tokens / step_s,
        "efficiency_low": None,
        "efficiency_high": None,
        "limit_share": None,
        "measured": True,
        "added_micro_batches": max(
            0, row.gradient_accumulation_steps - MOST_MICRO_BATCHES
        ),
    }
    return row.model_copy(update=update)
