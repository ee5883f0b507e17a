"""Throughput of a probed model by micro-batch size, and the size that it favours."""

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.base.window_statistics import estimate_windows
from autotune.errors import BadInput, OutOfTime, Undecided
from autotune.evidence.probe import CurvePoint, ThroughputDip
from autotune.kernels.decide.trace import NO_KERNELS
from autotune.memory.decide.batch_search import MAX_FAILURES
from autotune.memory.decide.throughput_dip import deepest_dip, grown_kernels
from autotune.memory.size_probe import SizeProbe, StepCounts
from autotune.memory.size_study import SizeStudy
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.micro_batch import (
    MicroBatchChoice,
    choose_by_throughput,
    choose_micro_batch,
    curve_sizes,
    with_headroom,
)
from autotune.trials.job_figures import KernelFigures, StepFigures
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    Measured,
    OutOfMemory,
    describe,
)
from autotune.trials.runner import TrialRunner

CURVE_STEPS = {
    "cpu": StepCounts(warmup=1, timed=4),
    "cuda": StepCounts(warmup=3, timed=10),
}
"""Steps of a point of the throughput curve, by device."""
SUSTAINED_S = {"cpu": 0.0, "cuda": 60.0}
"""Duration in seconds of the sustained trial, by device. It repeats the chosen
micro-batch, as a warm GPU at its power limit is slower; a CPU has no such trial."""
_SUSTAINED_MARGIN = 1.1
"""Factor by which the sustained trial has more steps than its time should take, as some
steps are faster than their median."""
_POINT_SHARE = 0.25
"""Largest share of the remaining time that the trial of one point may take, so that a
slow machine measures several points."""
_MAX_ADDED_POINTS = 3
"""Most sizes that are added to the curve before one of its sizes is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput of a model, and the micro-batch that was chosen by it."""

    curve: list[CurvePoint]
    """Points by ascending size; empty if nothing was measured."""
    choice: MicroBatchChoice
    """The chosen micro-batch size, and the reason for it."""
    dip: ThroughputDip | None = None
    """Deepest dip of the curve; None without one."""
    sustained: CurvePoint | None
    """The chosen micro-batch on a warm GPU; None if it was not measured."""


def measure_throughput(
    probe: SizeProbe, runner: TrialRunner, feasible_max: int, study: SizeStudy
) -> Throughput:
    """Measure the throughput of sizes that are known to fit, and choose one of them.

    If nothing can be measured, choose the largest size that leaves the headroom free,
    or less if that splits the global batch as well.

    Raises:
        Undecided: If a trial runs out of memory or fails too often.
    """
    unit = probe.multiple_of
    limit = with_headroom(feasible_max // unit, probe.headroom_share) * unit
    if not probe.measures_throughput:
        return _unmeasured(probe, limit, "its throughput was not requested")
    if not runner.measures_time:
        return _unmeasured(probe, limit, "on a pretended GPU no throughput is measured")
    curve_meter = _CurveMeter(probe=probe, runner=runner, study=study)
    try:
        sizes = curve_sizes(limit // unit, _split_size(probe, limit) // unit)
        curve = curve_meter.measure_curve([size * unit for size in sizes])
    except OutOfTime:
        return _unmeasured(probe, limit, "no time was left to measure throughput")
    choice = curve_meter.choose_size(curve, feasible_max)
    chosen_point = _point_of(curve, choice.micro_batch_size)
    sustained = None
    if chosen_point is not None:
        sustained = curve_meter.measure_sustained(chosen_point)
    dip = curve_meter.explain_dip(curve)
    return Throughput(curve=curve, choice=choice, dip=dip, sustained=sustained)


def _split_size(probe: SizeProbe, largest_size: int) -> int:
    """Return the size of training: that of an even split of the global batch.

    Args:
        probe: The subject and its limits.
        largest_size: Largest size that a micro-batch may have.

    Returns:
        The size; the largest one if there is no global batch to split.
    """
    if probe.global_batch_size is None:
        return largest_size
    ranks = probe.local_ranks
    global_batch_size = max(probe.global_batch_size, ranks)
    split = split_global_batch(global_batch_size, largest_size, ranks)
    return split.micro_batch_size


def _unmeasured(probe: SizeProbe, limit: int, reason_without_curve: str) -> Throughput:
    """Choose a size without any throughput.

    Args:
        probe: The subject and its limits.
        limit: Largest size that leaves the headroom free.
        reason_without_curve: Reason for not measuring, in words.
    """
    size = _split_size(probe, limit)
    reason = "the largest size that leaves the headroom free"
    if size < limit:
        reason = (
            f"the global batch needs no more, although {limit:,} leave the"
            " headroom free"
        )
    choice = MicroBatchChoice(
        micro_batch_size=size, reason=f"{reason}; {reason_without_curve}"
    )
    return Throughput(curve=[], choice=choice, sustained=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CurveMeter:
    """Measures points of the throughput curve, each by a trial."""

    probe: SizeProbe
    runner: TrialRunner
    study: SizeStudy

    def measure_curve(self, sizes: Sequence[int]) -> list[CurvePoint]:
        """Measure the throughput of sizes in their order, as far as time allows.

        Returns:
            Points by ascending size.

        Raises:
            OutOfTime: If not even the first size could be measured.
            Undecided: If a trial runs out of memory or fails too often.
        """
        first, *others = sizes
        curve = [self._measure_point(first)]
        with contextlib.suppress(OutOfTime):
            for size in others:
                curve.append(self._measure_point(size))
        return sorted(curve, key=lambda point: point.size)

    def choose_size(
        self, curve: list[CurvePoint], feasible_max: int
    ) -> MicroBatchChoice:
        """Choose the micro-batch size that splits the global batch best.

        A chosen size that was not measured is added to ``curve``, and the choice is
        made again, until it is a measured one. If time runs out, only measured sizes
        are compared.

        Raises:
            Undecided: If a trial runs out of memory or fails too often.
        """
        if self.probe.global_batch_size is None:
            return choose_by_throughput(curve, feasible_max, in_words=self.probe.words)
        choose_from = functools.partial(
            choose_micro_batch,
            curve,
            feasible_max,
            global_batch_size=self.probe.global_batch_size,
            ranks=self.probe.local_ranks,
        )
        for _ in range(_MAX_ADDED_POINTS):
            choice = choose_from(interpolated=True)
            if _point_of(curve, choice.micro_batch_size) is not None:
                return choice
            try:
                curve.append(self._measure_point(choice.micro_batch_size))
            except OutOfTime:
                break
            curve.sort(key=lambda point: point.size)
        return choose_from()

    def explain_dip(self, curve: Sequence[CurvePoint]) -> ThroughputDip | None:
        """Return the deepest dip of a curve, with the kernels that explain it."""
        dip = deepest_dip(curve)
        if dip is None:
            return None
        smaller, larger = dip.smaller, dip.larger
        found = ThroughputDip(
            smaller_size=smaller.size,
            larger_size=larger.size,
            ratio=larger.units_per_s / smaller.units_per_s,
        )
        if self.probe.in_this_process:
            reason = "functions of this process are not profiled"
            return found.model_copy(update={"not_profiled": reason})
        profiles: list[KernelFigures] = []
        for size in (found.smaller_size, found.larger_size):
            try:
                outcome = self.runner.run(
                    self.probe.kernels_trial(size),
                    f"{self.probe.subject.words}: kernels of a step,"
                    f" {self.probe.words(size)}",
                )
            except OutOfTime:
                return found.model_copy(update={"not_profiled": "no time was left"})
            except BadInput as error:
                return found.model_copy(update={"not_profiled": error.message})
            if not isinstance(outcome, Measured):
                reason = f"{describe(outcome)} with {self.probe.words(size)}"
                return found.model_copy(update={"not_profiled": reason})
            figures = KernelFigures.of(outcome)
            if not figures.kernels:
                return found.model_copy(update={"not_profiled": NO_KERNELS})
            profiles.append(figures)
        return found.model_copy(update={"kernels": grown_kernels(*profiles)})

    def measure_sustained(self, chosen_point: CurvePoint) -> CurvePoint | None:
        """Run the chosen micro-batch until the GPU is as warm as in training.

        Returns:
            Its throughput; None on a CPU, or if time runs out.

        Raises:
            Undecided: If it runs out of memory or fails too often.
        """
        device = self.probe.device
        # So a trial that takes up to four times as long is still within its time limit.
        longest_s = self.probe.trial_timeout_s / 4
        duration_s = min(SUSTAINED_S[device], longest_s)
        if not duration_s:
            return None
        timed_steps = math.ceil(_SUSTAINED_MARGIN * duration_s / chosen_point.step_s)
        steps = StepCounts(warmup=CURVE_STEPS[device].warmup, timed=max(1, timed_steps))
        with contextlib.suppress(OutOfTime):
            return self._measure_point(
                chosen_point.size, steps, f" for {duration_s:g} s"
            )
        return None

    def _measure_point(
        self,
        micro_batch_size: int,
        steps: StepCounts | None = None,
        duration_words: str = "",
    ) -> CurvePoint:
        """Measure the throughput of one micro-batch size, which is known to fit.

        Args:
            micro_batch_size: Sequences of each rank's micro-batch.
            steps: Steps of the trial; None for those of a point of the curve.
            duration_words: Duration of the trial, for its label.

        Raises:
            OutOfTime: If the time is up.
            Undecided: If it runs out of memory or fails too often.
        """
        label = f"{self.probe.words(micro_batch_size)}, throughput{duration_words}"
        self.study.begin(micro_batch_size)
        figures = self._undisturbed_figures(micro_batch_size, steps, label)
        units_per_step = figures.units_per_step
        median_step_s = statistics.median(figures.step_s)
        rates = [units_per_step / step_s for step_s in figures.step_s]
        interval = estimate_windows(rates).interval()
        return CurvePoint(
            size=micro_batch_size,
            units_per_s=units_per_step / median_step_s,
            step_s=median_step_s,
            timed_steps=len(figures.step_s),
            units_per_s_low=interval.low,
            units_per_s_high=interval.high,
        )

    def _undisturbed_figures(
        self, micro_batch_size: int, steps: StepCounts | None, label: str
    ) -> StepFigures:
        """Return the figures of the first trial that other programs do not disturb.

        A trial that crashes or is disturbed is repeated, at most ``MAX_FAILURES`` times
        in all.

        Raises:
            OutOfTime: If the time is up.
            Undecided: If it runs out of memory or fails too often.
        """
        probe = self.probe
        # On a CPU, the allocator settings that make a memory limit exact slow the step
        # down. The size is known to fit, so that its speed is measured without a limit.
        on_gpu = probe.on_gpu
        budget_bytes = probe.memory_budget_bytes if on_gpu else None
        for attempt in range(MAX_FAILURES):
            # A step of one micro-batch, which accumulation repeats.
            trial = probe.step_trial(
                micro_batch_size,
                # Fewer steps if earlier attempts took the time.
                steps or self._curve_steps(micro_batch_size),
                budget_bytes,
                attempt=attempt,
                timed=True,
            )
            again = f", attempt {attempt + 1}" if attempt else ""
            outcome = self.runner.run(
                trial, f"{probe.subject.words}: {label}{again}", timed=True
            )
            if not isinstance(outcome, Measured):
                self.study.note(micro_batch_size, outcome)
            is_last_attempt = attempt == MAX_FAILURES - 1
            can_repeat = isinstance(outcome, Crashed | Contaminated)
            if can_repeat and not is_last_attempt:
                continue
            if isinstance(outcome, OutOfMemory):
                raise Undecided(
                    f"micro-batch size {micro_batch_size} fitted at first, but not in"
                    f" the throughput trial: {outcome.detail}",
                    next_step="Leave more memory free: add --headroom 0.1",
                )
            measured = self.runner.require_measured(f"the trial {label!r}", outcome)
            return StepFigures.of(measured)
        raise AssertionError("the last attempt returns or raises")

    def _curve_steps(self, micro_batch_size: int) -> StepCounts:
        """Return the steps of a point of the curve; fewer if time is short."""
        usual = CURVE_STEPS[self.probe.device]
        budget_left_s = self.runner.budget_left_s
        step_s = self._expected_step_s(micro_batch_size)
        if budget_left_s is None or step_s is None:
            return usual
        affordable_steps = int(_POINT_SHARE * budget_left_s / step_s)
        affordable_timed = max(1, affordable_steps - usual.warmup)
        return replace(usual, timed=min(usual.timed, affordable_timed))

    def _expected_step_s(self, micro_batch_size: int) -> float | None:
        """Return the expected time of a step of one micro-batch on each rank.

        It is proportional to the units of a step, by the trials so far.

        Returns:
            None if no trial has figures yet.
        """
        seconds_per_unit = []
        for finished in self.runner.finished:
            if isinstance(finished.outcome, Measured):
                figures = StepFigures.of(finished.outcome)
                step_s = statistics.median(figures.step_s)
                seconds_per_unit.append(step_s / figures.units_per_step)
        if not seconds_per_unit:
            return None
        units = micro_batch_size * self.probe.subject.size.units_per_size
        return statistics.median(seconds_per_unit) * units * self.probe.local_ranks


def _point_of(curve: Sequence[CurvePoint], micro_batch_size: int) -> CurvePoint | None:
    """Return the point of a size; None if it was not measured."""
    for point in curve:
        if point.size == micro_batch_size:
            return point
    return None
