"""Search for the largest size of a step that fits, by trials.

The search ends with the largest size that ran, and the next one, which ran out of
memory. Trials decide; a trace, or the growth that trials show, predicts which sizes to
try.
"""

import functools
from dataclasses import dataclass, field

from autotune.base.units import format_bytes
from autotune.errors import BadInput, OutOfTime, Undecided
from autotune.memory.decide.batch_search import (
    MAX_FAILURES,
    Prediction,
    SizeTrial,
    bracket,
    next_size,
)
from autotune.memory.decide.caching_allocator import LARGE_PAGE_BYTES
from autotune.memory.decide.memory_model import memory_breakdown, peak_bytes
from autotune.memory.decide.step_doubts import (
    LONG_STEPS,
    Doubt,
    doubt_of,
    first_prediction,
    ignores_size,
    misses_steps,
    next_prediction,
)
from autotune.memory.estimate import CannotTrace, MemoryEstimate, estimate_model
from autotune.memory.size_probe import SizeProbe, StepCounts
from autotune.memory.size_study import SizeStudy, open_size_study
from autotune.memory.values import MemoryBreakdown
from autotune.subjects.decide import crash_words, error_line
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import (
    Contaminated,
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    TimedOut,
)
from autotune.trials.runner import TrialRunner
from autotune.trials.values import Trial

CLOSE_BYTES = 2**20
"""Usual difference between processes that run the same size."""
CPU_CLOSE_BYTES = 2**17
"""The same on a CPU, where a process's heap is full at first."""
WIDER = 4
"""Factor on the budget of a trial that shows how much too small it is."""
FIRST_SIZE = 4
"""First size without a prediction: large enough for batch normalisation, and for a
first look at how memory grows."""
_UNSURE_SHARE = 1 / 4
"""Share of the range of assumed overheads that is added to predicted peaks until a
trial fits. The first trial is then likely to fit, and to correct the prediction: a
trial that runs out of memory has no peak."""


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """Searches for the largest size of a step, one trial after the other.

    Inside, sizes are counted in multiples of ``probe.multiple_of``.
    """

    probe: SizeProbe
    runner: TrialRunner
    host_available_bytes: int
    """Memory of the host that is available, which limits wider trials on a CPU."""
    estimate: MemoryEstimate | None = None
    """Memory that a trace predicts; None until ``predict``, or without a trace."""
    not_traced: str | None = None
    """Reason why tracing failed; None if it did not, or was not requested."""
    tried: list[SizeTrial] = field(default_factory=list)
    """Trials so far, in their order."""
    prediction: Prediction | None = None
    """Peak memory by size, from a trace or else from trials; None before either."""
    study: SizeStudy = field(init=False)
    """Study with a trial for each size."""
    figures: dict[int, StepFigures] = field(default_factory=dict)
    """Figures of each size that fitted, the last of several trials."""
    varies_bytes: int = 0
    """Difference between steps of one size that was accepted."""
    _loads: int = 0
    """Number of times that late imports were moved in front of trials, which makes them
    other trials."""
    _last_failure: tuple[int, str] = (0, "")

    def __post_init__(self) -> None:
        self.study = open_size_study(self.probe)

    @property
    def name(self) -> str:
        """The subject, for labels of trials and for errors."""
        return self.probe.subject.words

    @property
    def budget_bytes(self) -> int:
        """Memory that a step may use."""
        return self.probe.memory_budget_bytes

    @property
    def max_size(self) -> int:
        """Largest size to try."""
        return max(1, self.probe.max_size // self.probe.multiple_of)

    @property
    def feasible_max(self) -> int:
        """Largest size that ran so far, in the unit of the subject; 0 without one."""
        return bracket(self.tried).feasible_max * self.probe.multiple_of

    @property
    def infeasible_min(self) -> int | None:
        """Smallest size that ran out of memory, in the unit of the subject."""
        smallest = bracket(self.tried).infeasible_min
        return None if smallest is None else smallest * self.probe.multiple_of

    def words(self, size: int) -> str:
        """Return a size in words."""
        return self.probe.words(size * self.probe.multiple_of)

    def predict(self) -> None:
        """Trace the step, and set ``prediction``.

        If no trace is requested or tracing fails, trials alone guide the search. If
        tracing fails, ``not_traced`` has the reason.
        """
        probe, overheads = self.probe, self.probe.overheads
        if probe.trace is None or overheads is None:
            return
        if self.estimate is None:
            self.runner.on_trial(f"{self.name}: predicting memory from a trace", None)
            try:
                self.estimate = estimate_model(
                    probe.trace,
                    self.runner.machine,
                    self.budget_bytes,
                    overheads.usual,
                    max_micro_batch_size=probe.max_size,
                )
            except CannotTrace as error:
                self.not_traced = error.message
                return
            except BadInput as error:
                # Of the bundled trainer, settings that no trial can run either.
                if probe.directory is None:
                    raise
                self.not_traced = error.message
                return
        memory_model = self.estimate.memory_model
        unit = probe.multiple_of

        # A search compares the same sizes after each trial, and the prediction of each
        # size replays a whole trace.
        @functools.cache
        def predicted_bytes(size: int) -> float:
            return float(peak_bytes(memory_model, size * unit, overheads.usual))

        range_bytes = (
            overheads.most.non_pytorch_bytes - overheads.least.non_pytorch_bytes
        )
        self.prediction = Prediction(
            peak_bytes=predicted_bytes, unsure_bytes=_UNSURE_SHARE * range_bytes
        )

    def find(self) -> None:
        """Try sizes until the largest is verified on both sides.

        Raises:
            BadInput: If a trial shows that the step cannot be probed.
            Undecided: If a size failed too often for another reason than memory.
            OutOfTime: If the time is up.
        """
        if self.estimate is None:
            self._try_first()
        page_bytes = LARGE_PAGE_BYTES if self.probe.on_gpu else 0
        while True:
            size = next_size(
                self.tried,
                self.budget_bytes,
                self.max_size,
                self.prediction,
                page_bytes,
            )
            if size is None:
                # The search has its answer; it may have to be confirmed.
                size = bracket(self.tried).feasible_max
                if not self._needs_second_trial(size):
                    return
            self.try_size(size)

    def _try_first(self) -> None:
        """Try the first size without a prediction, or the largest and then the first.

        Modules that the step imports within the trial are then imported before all
        trials, or they would count as its memory.
        """
        if self.probe.starts_at_most:
            self.try_size(self.max_size)
        if bracket(self.tried).feasible_max:
            return
        size = min(FIRST_SIZE, self.max_size)
        self.try_size(size)
        figures = self.figures.get(size)
        if self.tried[-1].fits is False and not self.probe.on_gpu:
            outcome = self.look(size)
            figures = StepFigures.of(outcome) if isinstance(outcome, Measured) else None
        if figures is None or self.probe.on_gpu or not figures.imported:
            return
        if self.probe.load_modules(figures.imported):
            self.tried, self._loads = [], self._loads + 1
            self.prediction = None
            self.figures.clear()
            self.try_size(size)

    def _needs_second_trial(self, size: int) -> bool:
        """Return whether the largest size ran only once, and might not fit again."""
        peaks_bytes = [
            trial.peak_bytes
            for trial in self._attempts_of(size)
            if trial.peak_bytes is not None
        ]
        if len(peaks_bytes) != 1:
            return False
        free_bytes = self.budget_bytes - peaks_bytes[0]
        is_exact = self.estimate is not None or self.probe.on_gpu
        close_bytes = CLOSE_BYTES if is_exact else CPU_CLOSE_BYTES
        # In one process, what an earlier trial left behind counts.
        return self.probe.in_this_process or free_bytes < close_bytes

    def try_size(self, size: int) -> None:
        """Run a trial of a size, and add its result to ``tried``.

        Raises:
            BadInput: If the trial shows that the step cannot be probed.
            Undecided: If the size failed too often for another reason than memory.
            OutOfTime: If the time is up; its message has the sizes known so far.
        """
        attempt = len(self._attempts_of(size))
        label = self.words(size)
        if attempt:
            label += f", attempt {attempt + 1}"
        units = size * self.probe.multiple_of
        self.study.begin(units)
        outcome = self._run(self.trial_of(size, attempt), label)
        self.study.note(units, outcome)
        self.tried.append(self._result(size, outcome, label))

    def trial_of(
        self,
        size: int,
        attempt: int = 0,
        *,
        steps: StepCounts | None = None,
        limit_bytes: int | None = 0,
    ) -> Trial:
        """Return a trial of a size.

        Args:
            size: Size, in multiples.
            attempt: Number of earlier attempts.
            steps: Steps to take; None for those of a trial of the search.
            limit_bytes: Memory that each rank may use; None without a limit, 0 for the
                budget.
        """
        return self.probe.step_trial(
            size * self.probe.multiple_of,
            steps or self.probe.fit_steps,
            self.budget_bytes if limit_bytes == 0 else limit_bytes,
            attempt=attempt + self._loads,
        )

    def look(self, size: int) -> Outcome:
        """Run a size with a wider limit.

        On a GPU there is none. On a CPU it is a multiple of the budget, as others use
        the host.
        """
        trial = self.trial_of(size, limit_bytes=self.wider_bytes)
        return self.runner.run(trial, f"{self.name}: {self.words(size)}, wider limit")

    @property
    def wider_bytes(self) -> int | None:
        """Limit of a trial that needs more than the budget; None for no limit."""
        if self.probe.on_gpu:
            return None
        return min(WIDER * self.budget_bytes, self.host_available_bytes // 2)

    def breakdown(self, size: int) -> MemoryBreakdown | None:
        """Return the predicted memory of a size; None if nothing is traced."""
        if self.estimate is None or self.probe.overheads is None:
            return None
        return memory_breakdown(
            self.estimate.memory_model, size, self.probe.overheads.usual
        )

    def _attempts_of(self, size: int) -> list[SizeTrial]:
        """Return all trials of a size so far."""
        return [trial for trial in self.tried if trial.micro_batch_size == size]

    def _result(self, size: int, outcome: Outcome, label: str) -> SizeTrial:
        """Return what an outcome shows about a size.

        Raises:
            BadInput: If the trial shows that the step cannot be probed.
            Undecided: If the size failed for another reason than memory, and repeating
                the trial would not help.
        """
        if isinstance(outcome, Measured):
            figures = self.figures[size] = StepFigures.of(outcome)
            self._judge(size, figures)
            return SizeTrial(
                micro_batch_size=size, fits=True, peak_bytes=figures.peak_bytes
            )
        if isinstance(outcome, OutOfMemory):
            return SizeTrial(micro_batch_size=size, fits=False)
        self._reject_failure(size, outcome)
        can_repeat = isinstance(outcome, Crashed | Contaminated)
        earlier_failures = [
            trial for trial in self._attempts_of(size) if trial.fits is None
        ]
        if not can_repeat or 1 + len(earlier_failures) >= MAX_FAILURES:
            # Nothing was measured, so this raises the error of such an outcome.
            self.runner.require_measured(f"the trial {label!r}", outcome)
        return SizeTrial(micro_batch_size=size, fits=None)

    def _judge(self, size: int, figures: StepFigures) -> None:
        """Check that a trial shows what a later step of this size will need.

        Without a trace, its peak also corrects the prediction.

        Raises:
            BadInput: If the step cannot be probed.
        """
        doubt = doubt_of(figures)
        if doubt is not None and not self.probe.in_this_process:
            self._confirm(size, *doubt)
        peaks_bytes = {
            trial.micro_batch_size: trial.peak_bytes or 0
            for trial in self.tried
            if trial.fits
        } | {size: figures.peak_bytes}
        by_size = sorted(peaks_bytes.items())
        if self.estimate is None:
            before = self.prediction
            self.prediction = (
                first_prediction(size, figures)
                if before is None
                else next_prediction(by_size, before)
            )
        equal = ignores_size(by_size, exact=not self.probe.in_this_process)
        if equal is not None:
            smaller, larger = equal
            argument = self.probe.subject.size.name
            raise BadInput(
                f"{self.name} seems to ignore {argument}:"
                f" {format_bytes(peaks_bytes[larger])} at {self.words(larger)} as at"
                f" {self.words(smaller)}",
                next_step=(
                    f"Make the batch as large as {argument} says; is the dataset"
                    " smaller?"
                ),
            )
        smallest = min(self.figures)
        if misses_steps(figures) and not misses_steps(self.figures[smallest]):
            raise BadInput(
                f"{self.name} took {figures.optimizer_steps} optimizer steps in"
                f" {figures.steps} calls at {self.words(size)}, and one in each at"
                f" {self.words(smallest)}",
                next_step=(
                    "If it catches OutOfMemoryError to skip a batch, let it raise in"
                    " trials."
                ),
            )

    def _confirm(self, size: int, doubt: Doubt, bytes_: int) -> None:
        """Take more steps of a doubtful size.

        Raises:
            BadInput: If the doubt remains.
        """
        if self.probe.allow_varying:
            self.varies_bytes = max(self.varies_bytes, bytes_)
            return
        label = f"{self.name}: {self.words(size)}, {LONG_STEPS} steps"
        steps = StepCounts(warmup=1, timed=LONG_STEPS - 1)
        trial = self.trial_of(size, steps=steps, limit_bytes=self.wider_bytes)
        outcome = self.runner.run(trial, label)
        remaining: tuple[Doubt, int] | None = (doubt, bytes_)
        if not isinstance(outcome, OutOfMemory):
            measured = self.runner.require_measured(f"the trial {label!r}", outcome)
            remaining = doubt_of(StepFigures.of(measured))
        if remaining is None:
            return
        doubt, bytes_ = remaining
        amount, at = format_bytes(bytes_), self.words(size)
        if doubt == "leaks":
            raise BadInput(
                f"{self.name} leaks memory: {amount} more after each step at {at}, so"
                " no size fits for long",
                next_step=(
                    "Find what your step keeps, such as losses with their graph: use"
                    " loss.detach()."
                ),
            )
        raise BadInput(
            f"{self.name} changes its memory between steps: {amount} of difference at"
            f" {at}, so a size that fits once may not fit later",
            next_step=(
                "Use the largest batch that can occur, such as the longest sequences;"
                " or add --allow-varying."
            ),
        )

    def _reject_failure(self, size: int, outcome: Outcome) -> None:
        """Raise an error for a failure of your code.

        A crash is an error only if it happens twice in the same way.
        """
        if isinstance(outcome, Measured) or self.probe.directory is None:
            return
        at = self.words(size)
        if isinstance(outcome, TimedOut):
            raise Undecided(
                f"{self.name} did not end within its time limit at {at}:"
                f" {outcome.detail}",
                next_step=(
                    "Allow more time with --trial-timeout; or mend the hang at that"
                    " place."
                ),
            )
        if not isinstance(outcome, Crashed):
            return
        failure = (size, error_line(outcome.detail))
        if self._last_failure != failure:
            self._last_failure = failure
            return
        next_step = f"Call it yourself with {at}, three times if it returns a step."
        if "NameError" in failure[1] and not self.probe.in_this_process:
            next_step += (
                " Trials import its module, without what is under 'if __name__"
                ' == "__main__":\'.'
            )
        raise BadInput(
            f"{self.name} {crash_words(outcome.detail, f' at {at}')}",
            next_step=next_step,
        )

    def _run(self, trial: Trial, label: str) -> Outcome:
        """Run a trial.

        Raises:
            OutOfTime: If the time is up; its message has the sizes known so far.
        """
        try:
            return self.runner.run(trial, f"{self.name}: {label}")
        except OutOfTime as error:
            raise OutOfTime(
                f"{self._known_words()}; {error.message}", next_step=error.next_step
            ) from error

    def _known_words(self) -> str:
        """Return the sizes that are known to fit and not to fit, in words."""
        if not self.feasible_max:
            return "no size is verified yet"
        words = f"{self.probe.words(self.feasible_max)} fit"
        if self.infeasible_min is not None:
            words += f", {self.infeasible_min} do not"
        return words
