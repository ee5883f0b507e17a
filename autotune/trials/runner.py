"""Running of trials, or reuse of their results from the trial log.

``TrialRunner`` runs one trial after the other, ``Rounds`` timed windows that are to be
compared. The windows of a round are interleaved, so that slow changes of a machine
affect all of them; every other round runs backwards, so that a drift within rounds
cancels too. A round is reused from the trial log completely or not at all.
"""

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from autotune.base.clock import Clock
from autotune.base.units import format_seconds
from autotune.errors import BadInput, OutOfTime, StartAgain, Undecided
from autotune.machine.values import is_pretended
from autotune.trials.decide.equal_loss import (
    LossVerdict,
    compare_losses,
    fell_too_little,
)
from autotune.trials.decide.plausibility import (
    RATE_JOBS,
    check_rates,
    check_real,
    is_possible,
    rates_of_trial,
)
from autotune.trials.outcomes import (
    Contaminated,
    Measured,
    Outcome,
    OutOfMemory,
    describe,
)
from autotune.trials.trial_log import TrialLog, read_trial_records
from autotune.trials.trial_machine import Machine
from autotune.trials.values import FinishedTrial, MadeOn, Trial, TrialRecord

LEAVING_S = 5.0
"""Time for the rest of a job after its last trial, in seconds."""
ATTEMPTS = 3
"""Attempts at a timed window that other processes or faults disturb."""
Key = TypeVar("Key")
Run = Callable[[Trial], Outcome]


@dataclass(slots=True, kw_only=True)
class TrialRunner:
    """Runner of trials, one for each trial log.

    Each result is on disk before the next trial starts.
    """

    machine: Machine
    trial_log: TrialLog
    site: str
    """Hash of machine and software; results of another site are not reused."""
    clock: Clock
    on_trial: Callable[[str, Outcome | None], None] = lambda label, outcome: None
    """Called before and after each trial, for progress."""
    on_finished: Callable[[FinishedTrial], None] = lambda finished: None
    """Called with each finished trial, those from the trial log included."""
    ends_s: float | None = None
    """Hard end, in seconds since 1970: no trial begins whose time limit does not fit
    before that."""
    budget_ends_s: float | None = None
    """End of the time budget, in seconds since 1970: no trial begins that is likely to
    end later."""
    made_on: MadeOn | None = None
    """Readable form of ``site``, for people and for reports of other profiles."""
    finished: list[FinishedTrial] = field(default_factory=list)
    _known: dict[str, FinishedTrial] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

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
        measure_by: Run | None = None,
    ) -> Outcome:
        """Return the trial's outcome, from the trial log or measured now.

        Args:
            trial: The trial.
            label: Its name for people.
            remeasure: Measure it even if the trial log has its outcome.
            timed: True if a rate is taken from a ``step``; ``RATE_JOBS`` always measure
                one.
            measure_by: Called instead of the machine.

        Raises:
            OutOfTime: If it is likely to end after ``budget_ends_s``.
            StartAgain: If it may exceed ``ends_s``.
            Undecided: If the GPU cannot reach a rate that was measured.
            MachineLacks: If a rate is to be measured on a pretended GPU.
        """
        takes_rate = timed or trial.job in RATE_JOBS
        if takes_rate and self.made_on is not None:
            check_real(self.made_on.gpu_name, self.made_on.driver, label)
        known = None
        if not remeasure:
            known = self._reusable(trial, takes_rate=takes_rate)
        self.on_trial(label, None)
        if known is None:
            finished = self._measure(
                trial,
                label,
                measure_by or self.machine.run,
                takes_rate=takes_rate,
            )
        else:
            finished = replace(known, trial=trial, label=label)
        self.finished.append(finished)
        self.on_finished(finished)
        self.on_trial(label, finished.outcome)
        return finished.outcome

    def _reusable(self, trial: Trial, *, takes_rate: bool) -> FinishedTrial | None:
        """Return the trial's logged result, unless its rate is impossible."""
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
        self, trial: Trial, label: str, run: Run, *, takes_rate: bool
    ) -> FinishedTrial:
        """Run a trial and write its result to the trial log."""
        self._check_time(trial, label)
        started_s = self.clock.monotonic_s()
        outcome = run(trial)
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

    def require_measured(self, what: str, outcome: Outcome) -> Measured:
        """Return the outcome of a trial that must have figures.

        Args:
            what: The measurement, for the message.
            outcome: Its outcome.

        Raises:
            Undecided: If the trial has no figures.
        """
        if isinstance(outcome, Measured):
            return outcome
        message = (
            f"{what} could not be measured ({describe(outcome)}):\n{outcome.detail}"
        )
        raise Undecided(
            message.rstrip(),
            next_step=(
                "Fix the cause and run the same command again: it resumes from"
                f" {self.trial_log.directory}."
            ),
        )

    @property
    def pretended(self) -> bool:
        """True if the GPU is a pretended one, on which only memory can be measured."""
        return self.made_on is not None and is_pretended(self.made_on.driver)

    @property
    def seconds(self) -> float:
        """Time of all finished trials, those from the trial log included."""
        return sum(finished.seconds for finished in self.finished)

    @property
    def budget_left_s(self) -> float | None:
        """Time left of the budget, in seconds; None if there is no budget."""
        if self.budget_ends_s is None:
            return None
        return max(0.0, self.budget_ends_s - self.clock.utc_now().timestamp())

    def _check_time(self, trial: Trial, label: str) -> None:
        """Check that a trial is likely to end in time."""
        now_s = self.clock.utc_now().timestamp()
        if self.budget_ends_s is not None:
            self._check_budget(self.budget_ends_s - now_s, label)
        if self.ends_s is not None:
            self._check_hard_end(self.ends_s - now_s, trial, label)

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

    def _check_hard_end(self, left_s: float, trial: Trial, label: str) -> None:
        """Check that even a trial that reaches its time limit ends with the job."""
        if left_s >= trial.timeout_s + LEAVING_S:
            return
        raise StartAgain(
            f"the job ends in {max(0.0, left_s):.0f} s, but the next trial"
            f" ({label}) may take {trial.timeout_s:g} s, plus {LEAVING_S:g} s"
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
        """Keep the record.

        Only figures and out of memory are reused, other failures are tried again.
        """
        finished = record.finished()
        if isinstance(finished.outcome, Measured | OutOfMemory):
            self._known[record.key] = finished
        else:
            self._failed.add(record.key)


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Measurement of timed windows in rounds, with their number and time."""

    runner: TrialRunner
    windows: int = 0
    """Number of windows that gave figures."""
    seconds: float = 0.0
    """Time of all windows, those from the trial log included."""

    @property
    def totals(self) -> dict[str, Any]:
        """Windows and seconds, in the form of the evidence."""
        return {"windows": self.windows, "seconds": round(self.seconds, 3)}

    def measure_round(
        self,
        number: int,
        trials: Mapping[Key, tuple[Trial, str]],
        check: Callable[[Key, Outcome, float], None],
        on_rejected: Callable[[Key, BadInput], None] | None = None,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of a round.

        Windows that failed in a logged round are tried again; if one succeeds, the
        whole round is measured again.

        Args:
            number: Number of the round; odd ones run backwards.
            trials: Windows with their labels.
            check: Gets each outcome with its seconds, and may raise.
            on_rejected: Gets the error of a window whose input is unusable, which is
                left out; without it, the error is raised.
        """
        if number % 2 == 1:
            trials = dict(reversed(list(trials.items())))
        measure = functools.partial(
            self._measure_windows, trials, check=check, on_rejected=on_rejected
        )
        unknown = [
            key for key, (trial, _) in trials.items() if not self.runner.knows(trial)
        ]
        # The round is in the trial log if every unknown window has failed there.
        # Rejected windows are not logged.
        is_logged = all(self.runner.has_failed(trials[key][0]) for key in unknown)
        if on_rejected is not None and len(unknown) < len(trials):
            is_logged = True
        outcomes = measure(remeasure=not is_logged)
        has_recovered = any(isinstance(outcomes.get(key), Measured) for key in unknown)
        if is_logged and has_recovered:
            outcomes = measure(remeasure=True)
        return outcomes

    def _measure_windows(
        self,
        trials: Mapping[Key, tuple[Trial, str]],
        *,
        check: Callable[[Key, Outcome, float], None],
        on_rejected: Callable[[Key, BadInput], None] | None,
        remeasure: bool,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of windows in their order, as ``measure_round`` does."""
        outcomes = {}
        for key, (trial, label) in trials.items():
            try:
                outcome = self.measure_window(trial, label, remeasure=remeasure)
            except BadInput as error:
                if on_rejected is None:
                    raise
                on_rejected(key, error)
                continue
            check(key, outcome, self.runner.finished[-1].seconds)
            outcomes[key] = outcome
        return outcomes

    def measure_window(
        self, trial: Trial, label: str, *, remeasure: bool = False
    ) -> Outcome:
        """Return a window's outcome; a disturbed window is measured again."""
        for attempt in range(1, ATTEMPTS + 1):
            attempt_label = label if attempt == 1 else f"{label}, attempt {attempt}"
            outcome = self.runner.run(trial, attempt_label, remeasure=remeasure)
            self.seconds += self.runner.finished[-1].seconds
            if not isinstance(outcome, Contaminated):
                break
        if isinstance(outcome, Measured):
            self.windows += 1
        return outcome


def check_loss(names: tuple[str, str], train: Callable[[str], Outcome]) -> LossVerdict:
    """Train with both settings from one start on the same data, and compare the losses.

    Args:
        names: Names of the settings, the reference first.
        train: Trains with the setting of a name.
    """
    losses_by_setting: list[tuple[float, ...]] = []
    for name in names:
        outcome = train(name)
        if not isinstance(outcome, Measured):
            message = f"not checked: the run with {name} failed ({describe(outcome)})"
            return LossVerdict(equal=False, message=message)
        losses = tuple(outcome.figures["losses"])
        losses_by_setting.append(losses)
        if len(losses_by_setting) == 1:
            verdict = fell_too_little(losses, name)
            if verdict is not None:
                return verdict
    reference, other = losses_by_setting
    return compare_losses(reference, other, names)
