"""Throughput of a probed model by micro-batch size, and the size that it favours."""

import contextlib
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.base.window_statistics import estimate_windows
from autotune.base.wording import plural
from autotune.errors import OutOfTime, Undecided
from autotune.memory.decide.batch_search import MAX_FAILURES
from autotune.memory.probe import Probe, StepCounts, step_trial
from autotune.memory.values import CurvePoint
from autotune.profiles.decide.micro_batch import (
    MicroBatchChoice,
    choose_micro_batch,
    curve_sizes,
    with_headroom,
)
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Contaminated, Crashed, Measured, OutOfMemory
from autotune.trials.runner import TrialRunner

CURVE_STEPS = {
    "cpu": StepCounts(warmup=1, timed=4),
    "cuda": StepCounts(warmup=3, timed=10),
}
"""Steps of a point of the throughput curve."""
SUSTAINED_S = {"cpu": 0.0, "cuda": 60.0}
"""Seconds of the trial of the chosen micro-batch: a warm GPU at its power limit is
slower."""
_SUSTAINED_MARGIN = 1.1
"""Steps of that trial over the number that should take its time, as steps differ."""
_POINT_SHARE = 0.25
"""Largest share of the time left for the trial of one point, so that a slow machine
measures several."""
_MAX_CHOICES = 3
"""Most sizes that are added to the curve before one of its sizes is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Throughput of a model, and the micro-batch that was chosen by it."""

    curve: list[CurvePoint]
    """Points by ascending size; empty if nothing was measured."""
    choice: MicroBatchChoice
    sustained: CurvePoint | None
    """The chosen micro-batch on a warm GPU; None if it was not measured."""


def measure_throughput(
    probe: Probe, runner: TrialRunner, feasible_max: int
) -> Throughput:
    """Measure the throughput of sizes that are known to fit, and choose one of them.

    Without any throughput, the largest size that leaves the headroom free is chosen.

    Raises:
        Undecided: If a trial runs out of memory or fails too often.
    """
    measurement = _Measurement(probe=probe, runner=runner)
    limit = with_headroom(feasible_max, probe.request.headroom_share)
    curve: list[CurvePoint] = []
    not_timed = "on a pretended GPU no throughput is measured"
    if not runner.pretended:
        not_timed = "no time was left to measure throughput"
        with contextlib.suppress(OutOfTime):
            curve = measurement.curve(curve_sizes(limit))
    if not curve:
        reason = f"the largest size that leaves the headroom free; {not_timed}"
        choice = MicroBatchChoice(micro_batch_size=limit, reason=reason)
        return Throughput(curve=curve, choice=choice, sustained=None)
    choice = measurement.choose(curve, feasible_max)
    chosen = _point_of(curve, choice.micro_batch_size)
    sustained = None if chosen is None else measurement.sustained(chosen)
    return Throughput(curve=curve, choice=choice, sustained=sustained)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    """Measures points of the throughput curve, each by a trial."""

    probe: Probe
    runner: TrialRunner

    def curve(self, sizes: Sequence[int]) -> list[CurvePoint]:
        """Measure throughput from the largest size down, as far as time allows.

        Raises:
            OutOfTime: If not even the largest size could be measured.
        """
        *smaller, largest = sizes
        points = [self._point(largest)]
        with contextlib.suppress(OutOfTime):
            for size in reversed(smaller):
                points.insert(0, self._point(size))
        return points

    def choose(self, curve: list[CurvePoint], feasible_max: int) -> MicroBatchChoice:
        """Choose the split of the global batch.

        If the chosen size was not measured, add it to the curve.
        """
        choose_from = functools.partial(
            choose_micro_batch,
            curve,
            feasible_max,
            global_batch_size=self.probe.config.global_batch_size,
            ranks=self.probe.local_ranks,
        )
        all_sizes = range(1, curve[-1].micro_batch_size + 1)
        for _ in range(_MAX_CHOICES):
            choice = choose_from(sizes=all_sizes)
            if _point_of(curve, choice.micro_batch_size) is not None:
                return choice
            try:
                curve.append(self._point(choice.micro_batch_size))
            except OutOfTime:
                break
            curve.sort(key=lambda point: point.micro_batch_size)
        # Only measured sizes.
        return choose_from()

    def sustained(self, chosen: CurvePoint) -> CurvePoint | None:
        """Run the chosen micro-batch until the GPU is as warm as in training.

        Returns:
            Its throughput; None on a CPU, or if time runs out.
        """
        device = self.probe.config.device
        seconds = min(SUSTAINED_S[device], self.probe.request.trial_timeout_s / 4)
        if not seconds:
            return None
        steps = StepCounts(
            warmup=CURVE_STEPS[device].warmup,
            timed=max(1, math.ceil(_SUSTAINED_MARGIN * seconds / chosen.step_s)),
        )
        with contextlib.suppress(OutOfTime):
            return self._point(chosen.micro_batch_size, steps, f" for {seconds:g} s")
        return None

    def _point(
        self, micro_batch_size: int, steps: StepCounts | None = None, duration: str = ""
    ) -> CurvePoint:
        """Measure the throughput of one micro-batch size, which is known to fit.

        Raises:
            OutOfTime: If the time is up.
            Undecided: If it runs out of memory or fails too often.
        """
        label = f"{plural(micro_batch_size, 'sequence')}, throughput{duration}"
        figures = self._figures(micro_batch_size, steps, label)
        tokens_per_step = figures.padded_tokens_per_step
        step_s = statistics.median(figures.step_s)
        rates = [tokens_per_step / seconds for seconds in figures.step_s]
        interval = estimate_windows(rates).interval()
        return CurvePoint(
            micro_batch_size=micro_batch_size,
            padded_tokens_per_s=tokens_per_step / step_s,
            step_s=step_s,
            timed_steps=len(figures.step_s),
            padded_tokens_per_s_low=interval.low,
            padded_tokens_per_s_high=interval.high,
        )

    def _figures(
        self, micro_batch_size: int, steps: StepCounts | None, label: str
    ) -> StepFigures:
        """Return the figures of the first attempt that is not disturbed.

        Raises:
            OutOfTime: If the time is up.
            Undecided: If it runs out of memory or fails too often.
        """
        probe = self.probe
        # Allocator settings that make a CPU's limit exact slow it down; speed is
        # measured without, as the size fits.
        on_gpu = probe.config.device == "cuda"
        budget_bytes = probe.memory_budget_bytes if on_gpu else None
        for attempt in range(MAX_FAILURES):
            # A step of one micro-batch, which accumulation repeats.
            trial = step_trial(
                probe,
                micro_batch_size,
                # Fewer steps if earlier attempts took the time.
                steps or self._curve_steps(micro_batch_size),
                budget_bytes,
                attempt=attempt,
                micro_batches=1,
            )
            again = f", attempt {attempt + 1}" if attempt else ""
            outcome = self.runner.run(
                trial, f"{probe.config.model.name}: {label}{again}", timed=True
            )
            if not isinstance(outcome, Crashed | Contaminated):
                break
        if isinstance(outcome, OutOfMemory):
            raise Undecided(
                f"micro-batch size {micro_batch_size} fitted at first, but not in the"
                f" throughput trial: {outcome.detail}",
                next_step="Leave more memory free: add --headroom 0.1",
            )
        return StepFigures.of(
            self.runner.require_measured(f"the trial {label!r}", outcome)
        )

    def _curve_steps(self, micro_batch_size: int) -> StepCounts:
        """Return the steps of a point: fewer of them on a machine that is too slow."""
        usual = CURVE_STEPS[self.probe.config.device]
        left_s = self.runner.budget_left_s
        step_s = self._expected_step_s(micro_batch_size)
        if left_s is None or not step_s:
            return usual
        timed = int(_POINT_SHARE * left_s / step_s) - usual.warmup
        return replace(usual, timed=min(usual.timed, max(1, timed)))

    def _expected_step_s(self, micro_batch_size: int) -> float:
        """Return the seconds of a step of one micro-batch, by the trials so far.

        0 if none of them has figures.
        """
        seconds_per_token = []
        for finished in self.runner.finished:
            if isinstance(finished.outcome, Measured):
                figures = StepFigures.of(finished.outcome)
                step_s = statistics.median(figures.step_s)
                seconds_per_token.append(step_s / figures.padded_tokens_per_step)
        if not seconds_per_token:
            return 0.0
        tokens = micro_batch_size * self.probe.config.seq_length_tokens
        return statistics.median(seconds_per_token) * tokens * self.probe.local_ranks


def _point_of(curve: Sequence[CurvePoint], micro_batch_size: int) -> CurvePoint | None:
    """Return the point of a size; None if it was not measured."""
    for point in curve:
        if point.micro_batch_size == micro_batch_size:
            return point
    return None
