"""Running of trials, or reuse of their results from the trial log."""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from autotune.base.clock import Clock
from autotune.base.units import format_seconds
from autotune.errors import OutOfTime, StartAgain, Undecided
from autotune.trials.decide.plausibility import (
    RATE_JOBS,
    check_rates,
    check_takes_time,
    is_possible,
    rates_of_trial,
)
from autotune.trials.outcomes import Measured, Outcome, OutOfMemory, describe
from autotune.trials.trial_log import TrialLog, read_trial_records
from autotune.trials.trial_machine import Machine
from autotune.trials.values import FinishedTrial, MadeOn, Trial, TrialRecord

EXIT_S = 5.0
"""Time that this program needs to exit after its last trial, in seconds."""
RunTrial = Callable[[Trial], Outcome]
"""Function that runs a trial to its end, as ``Machine.run`` does."""


@dataclass(slots=True, kw_only=True)
class TrialRunner:
    """Runner of trials, one after the other, for one trial log.

    Each result is on disk before the next trial starts.
    """

    machine: Machine
    trial_log: TrialLog
    site: str
    """Hash of machine, software, model and dataset; only results of the same site are
    reused."""
    clock: Clock
    on_trial: Callable[[str, Outcome | None], None] = lambda label, outcome: None
    """Shows progress: called with a trial's label and None before the trial, and with
    its label and outcome after it."""
    on_finished: Callable[[FinishedTrial], None] = lambda finished: None
    """Called with each finished trial, those from the trial log included."""
    job_ends_s: float | None = None
    """End of the cluster's job, in seconds since 1970; None if there is none. No trial
    begins whose time limit does not fit before it."""
    budget_ends_s: float | None = None
    """End of the time budget, in seconds since 1970; None if there is none. No trial
    begins that is likely to end later."""
    made_on: MadeOn | None = None
    """Readable form of ``site``, for people and for reports of other profiles. Without
    it, rates are not compared with the peak of the GPU."""
    finished: list[FinishedTrial] = field(default_factory=list)
    """Trials of this runner in their order, those from the trial log included."""
    _known: dict[str, FinishedTrial] = field(default_factory=dict)
    """Results that may be reused, by the key of the trial."""
    _failed: set[str] = field(default_factory=set)
    """Keys of trials that failed at least once in a way that is tried again."""

    def __post_init__(self) -> None:
        records, _ = read_trial_records(self.trial_log.directory)
        for record in records:
            if record.site == self.site:
                self._remember(record)

    def knows(self, trial: Trial) -> bool:
        """Return whether the trial was measured before."""
        return trial.key in self._known

    def has_failed(self, trial: Trial) -> bool:
        """Return whether the trial was run before, without a result to reuse."""
        return trial.key in self._failed and trial.key not in self._known

    def run(
        self,
        trial: Trial,
        label: str,
        *,
        remeasure: bool = False,
        timed: bool = False,
        measure_by: RunTrial | None = None,
    ) -> Outcome:
        """Return the trial's outcome, from the trial log or measured now.

        Args:
            trial: The trial.
            label: Its name for people.
            remeasure: Measure it even if the trial log has its outcome.
            timed: True if the caller takes a rate from a ``step``. Jobs in
                ``RATE_JOBS`` always measure one.
            measure_by: Runs the trial instead of the machine.

        Raises:
            OutOfTime: If the trial is likely to end after ``budget_ends_s``.
            StartAgain: If the trial may exceed ``job_ends_s``.
            Undecided: If the GPU cannot reach a rate that was measured.
            MachineLacks: If a rate is to be measured on a GPU that takes no time.
        """
        takes_rate = timed or trial.job in RATE_JOBS
        if takes_rate and self.made_on is not None:
            check_takes_time(self.made_on.gpu, label)
        known = None
        if not remeasure:
            known = self._reusable(trial, takes_rate=takes_rate)
        self.on_trial(label, None)
        if known is None:
            run_trial = self.machine.run if measure_by is None else measure_by
            finished = self._measure(trial, label, run_trial, takes_rate=takes_rate)
        else:
            finished = replace(known, trial=trial, label=label)
        self.finished.append(finished)
        self.on_finished(finished)
        self.on_trial(label, finished.outcome)
        return finished.outcome

    def _reusable(self, trial: Trial, *, takes_rate: bool) -> FinishedTrial | None:
        """Return the trial's result from the trial log, unless its rate is impossible.

        Returns:
            The result, or None if the trial must be measured.
        """
        known = self._known.get(trial.key)
        if known is None or self.made_on is None or not takes_rate:
            return known
        outcome = known.outcome
        if isinstance(outcome, Measured) and not is_possible(
            self.made_on.gpu_name, rates_of_trial(trial, outcome)
        ):
            return None
        return known

    def _measure(
        self, trial: Trial, label: str, run_trial: RunTrial, *, takes_rate: bool
    ) -> FinishedTrial:
        """Run a trial and write its result to the trial log."""
        self._check_time(trial, label)
        started_s = self.clock.monotonic_s()
        outcome = run_trial(trial)
        if takes_rate and self.made_on is not None and isinstance(outcome, Measured):
            check_rates(self.made_on.gpu_name, rates_of_trial(trial, outcome))
        # Rounded as in the trial log, so that decisions by time are the same when it is
        # read back.
        seconds = round(self.clock.monotonic_s() - started_s, 3)
        record = TrialRecord(
            time_utc=self.clock.utc_now().isoformat(),
            site=self.site,
            key=trial.key,
            job=trial.job,
            measured=trial.measured,
            label=label,
            outcome=asdict(outcome),
            seconds=seconds,
            made_on=self.made_on,
        )
        self.trial_log.append(record.model_dump(mode="json"))
        self._remember(record)
        return FinishedTrial(
            trial=trial,
            outcome=outcome,
            seconds=seconds,
            label=label,
            from_trial_log=False,
            made_on=self.made_on,
        )

    def require_measured(self, subject: str, outcome: Outcome) -> Measured:
        """Return the outcome of a trial that must have figures.

        Args:
            subject: Name of the measurement, for the message.
            outcome: Outcome of the trial.

        Raises:
            Undecided: If the trial has no figures.
        """
        if isinstance(outcome, Measured):
            return outcome
        message = (
            f"{subject} could not be measured ({describe(outcome)}):\n{outcome.detail}"
        )
        raise Undecided(
            message.rstrip(),
            next_step=(
                "Fix the cause and run the same command again: it resumes from"
                f" {self.trial_log.directory}."
            ),
        )

    @property
    def measures_time(self) -> bool:
        """False on a GPU that takes no time, where only memory can be measured."""
        return self.made_on is None or self.made_on.gpu.takes_time

    @property
    def seconds(self) -> float:
        """Seconds that all finished trials took, those from the trial log included."""
        return sum(finished.seconds for finished in self.finished)

    @property
    def budget_left_s(self) -> float | None:
        """Time left of the budget, in seconds; None if there is no budget."""
        if self.budget_ends_s is None:
            return None
        return max(0.0, self.budget_ends_s - self.clock.utc_now().timestamp())

    def _check_time(self, trial: Trial, label: str) -> None:
        """Check that a trial fits the time budget and the cluster's job.

        Raises:
            OutOfTime: If the trial is likely to end after ``budget_ends_s``.
            StartAgain: If the trial may exceed ``job_ends_s``.
        """
        now_s = self.clock.utc_now().timestamp()
        if self.budget_ends_s is not None:
            self._check_budget(self.budget_ends_s - now_s, label)
        if self.job_ends_s is not None:
            self._check_end_of_job(self.job_ends_s - now_s, trial, label)

    def _check_budget(self, left_s: float, label: str) -> None:
        """Check that a trial of the usual length ends within the time budget."""
        usual_s = self._usual_s()
        if left_s >= usual_s:
            return
        message = f"no time is left for the next trial ({label})"
        if left_s > 0:
            message = (
                f"{format_seconds(left_s)} are left, but the next trial"
                f" ({label}) takes about {format_seconds(usual_s)}"
            )
        raise OutOfTime(
            message,
            next_step=(
                "Run it again with a longer --time-limit: it resumes from"
                f" {self.trial_log.directory}."
            ),
        )

    def _check_end_of_job(self, left_s: float, trial: Trial, label: str) -> None:
        """Check that even a trial that reaches its time limit ends before the job."""
        if left_s >= trial.timeout_s + EXIT_S:
            return
        raise StartAgain(
            f"the job ends in {max(0.0, left_s):.0f} s, but the next trial"
            f" ({label}) may take {trial.timeout_s:g} s, plus {EXIT_S:g} s"
            f" to exit; {len(self.finished)} results are in"
            f" {self.trial_log.directory}",
            next_step=(
                "Run the same command again: it resumes. A shorter"
                " --trial-timeout uses more of the job."
            ),
        )

    def _usual_s(self) -> float:
        """Return the median time of the trials measured so far; 0 if there are none."""
        measured_s = [
            finished.seconds
            for finished in self.finished
            if not finished.from_trial_log
        ]
        return statistics.median(measured_s) if measured_s else 0.0

    def _remember(self, record: TrialRecord) -> None:
        """Keep a record for reuse if it has figures or is an out of memory.

        Other failures are tried again.
        """
        finished = record.finished()
        if isinstance(finished.outcome, Measured | OutOfMemory):
            self._known[record.key] = finished
        else:
            self._failed.add(record.key)
