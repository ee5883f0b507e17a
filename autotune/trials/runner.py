"""Run a trial, or take its result from the trial log when it has been run before; and windows in rounds.

Windows of a round are read one after the other, so that what a machine's minutes do to one they do to all. Every other
round is read backwards: a drift within rounds cancels too. A round is taken from the trial log whole or not at all, as
its windows are compared with each other.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from autotune.base.clock import Clock
from autotune.errors import BadInput, OutOfTime, StartAgain, Undecided
from autotune.machine.values import is_pretended
from autotune.trials.decide.equal_loss import LossVerdict, compare_losses, fell_too_little
from autotune.trials.decide.plausibility import RATE_JOBS, check_rates, check_real, is_possible, rates_of_trial
from autotune.trials.fork_server import Machine
from autotune.trials.trial_log import TrialLog, read_trial_records
from autotune.trials.values import (
    Contaminated,
    FinishedTrial,
    MadeOn,
    Measured,
    Outcome,
    OutOfMemory,
    Trial,
    TrialRecord,
    describe,
)

LEAVING_S = 5.0
"""What is left to be done after the last trial of a job."""
ATTEMPTS = 3
"""A window that somebody else spoiled is read again so often."""
Key = TypeVar("Key")


@dataclass(slots=True, kw_only=True)
class TrialRunner:
    """Runs trials once per trial log: each result is on disk before the next trial starts."""

    machine: Machine
    trial_log: TrialLog
    site: str
    """Identifies machine and software; results of another site are not taken for this one's."""
    clock: Clock
    on_trial: Callable[[str, Outcome | None], None] = lambda label, outcome: None
    """Called before and after each trial, for progress."""
    on_finished: Callable[[FinishedTrial], None] = lambda finished: None
    """Called with each finished trial, those from the trial log included."""
    ends_s: float | None = None
    """When all must be over, in seconds since 1970: no trial begins whose time limit does not fit before that."""
    budget_ends_s: float | None = None
    """When all should be over, in seconds since 1970: no trial begins that is likely to end later."""
    made_on: MadeOn | None = None
    """The same as ``site``, as people and other profiles' reports read it."""
    finished: list[FinishedTrial] = field(default_factory=list)
    _known: dict[str, FinishedTrial] = field(default_factory=dict)
    _failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for record in read_trial_records(self.trial_log.directory)[0]:
            if record.site == self.site:
                self._remember(record)

    def knows(self, trial: Trial) -> bool:
        """Return whether the trial was measured before."""
        return trial.key in self._known

    def has_failed(self, trial: Trial) -> bool:
        """Return whether it was run before, and came to nothing that is taken from the trial log."""
        return trial.key in self._failed and trial.key not in self._known

    def run(self, trial: Trial, label: str, *, anew: bool = False, timed: bool = False) -> Outcome:
        """Return the trial's outcome, measured now or, unless it is to be measured anew, before.

        ``timed`` says that a rate is taken from a ``step``; the other jobs that measure one have no other answer.

        Raises:
            OutOfTime: If it is likely to end after ``budget_ends_s``.
            StartAgain: If there may not be time enough left for it.
            Undecided: If it measured a rate that the GPU cannot reach.
            MachineLacks: If it is to measure a rate, and the GPU is a pretended one.
        """
        here = self.made_on if timed or trial.job in RATE_JOBS else None
        if here is not None:
            check_real(here.gpu_name, here.driver, label)
        done = None if anew else self._known.get(trial.key)
        if done is not None and here is not None and isinstance(done.outcome, Measured):
            done = done if is_possible(here.gpu_name, rates_of_trial(trial, done.outcome)) else None
        self.on_trial(label, None)
        if done is None:
            self._check_time(trial, label)
            started_s = self.clock.monotonic_s()
            outcome = self.machine.run(trial)
            if isinstance(outcome, Measured) and here is not None:
                check_rates(here.gpu_name, rates_of_trial(trial, outcome))
            # As the trial log keeps it: whoever goes by time decides the same when it is read back.
            seconds = round(self.clock.monotonic_s() - started_s, 3)
            done = FinishedTrial(trial=trial, outcome=outcome, seconds=seconds, label=label, from_trial_log=False)
            self._write(done)
        done = replace(done, trial=trial, label=label)
        self.finished.append(done)
        self.on_finished(done)
        self.on_trial(label, done.outcome)
        return done.outcome

    @property
    def pretended(self) -> bool:
        """Whether the GPU is a pretended one, on which memory can be tried and nothing else."""
        return self.made_on is not None and is_pretended(self.made_on.driver)

    @property
    def seconds(self) -> float:
        """Time that the finished trials took, those from the trial log included."""
        return sum(done.seconds for done in self.finished)

    def _check_time(self, trial: Trial, label: str) -> None:
        now_s, place = self.clock.utc_now().timestamp(), self.trial_log.directory
        if self.budget_ends_s is not None:
            left_s = self.budget_ends_s - now_s
            usual_s = statistics.median([done.seconds for done in self.finished if not done.from_trial_log] or [0.0])
            if left_s < usual_s:
                raise OutOfTime(
                    f"{max(0.0, left_s):.0f} s are left, and the next trial ({label}) takes about {usual_s:.0f} s",
                    next_step=f"Run it again with more --minutes: it resumes from {place}.",
                )
        if self.ends_s is not None and self.ends_s - now_s < trial.timeout_s + LEAVING_S:
            raise StartAgain(
                f"the job ends in {max(0.0, self.ends_s - now_s):.0f} s, and the next trial ({label}) may take "
                f"{trial.timeout_s:g} s, and leaving {LEAVING_S:g} s; {len(self.finished)} results are in {place}",
                next_step="Run the same command again: it goes on from there. A smaller --trial-timeout uses more of a "
                "job's time.",
            )

    def _write(self, done: FinishedTrial) -> None:
        record = TrialRecord(
            time_utc=self.clock.utc_now().isoformat(),
            site=self.site,
            **done.trial.identity,
            label=done.label,
            outcome=asdict(done.outcome),
            seconds=done.seconds,
            made_on=self.made_on,
        )
        self.trial_log.append(record.model_dump(mode="json"))
        self._remember(record)

    def _remember(self, record: TrialRecord) -> None:
        """Only what would come out the same again; whatever crashed or was late gets another chance."""
        done = record.finished()
        if isinstance(done.outcome, Measured | OutOfMemory):
            self._known[record.key] = done
        else:
            self._failed.add(record.key)


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Reads windows, and knows what they took."""

    runner: TrialRunner
    windows: int = 0
    """That gave figures."""
    seconds: float = 0.0
    """Of all windows, those from the trial log included."""

    @property
    def taken(self) -> dict[str, Any]:
        """Windows and seconds, as evidence keeps them."""
        return {"windows": self.windows, "seconds": round(self.seconds, 3)}

    def read(
        self,
        number: int,
        trials: Mapping[Key, tuple[Trial, str]],
        check: Callable[[Key, Outcome, float], None],
        refuse: Callable[[Key, BadInput], None] | None = None,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of a round; ``trials`` are windows with their labels.

        What failed or was refused in a round of the trial log has a chance alone; should it run, the round is read
        again. ``check`` is called after each window with its seconds, and ends the round by an exception. ``refuse``
        hears of windows whose input cannot be used, which have no outcome; without it the first ends the round.
        """

        def in_turn(*, anew: bool) -> dict[Key, Outcome]:
            found = {}
            for key in turn(number, list(trials)):
                try:
                    found[key] = self.run(*trials[key], anew=anew)
                except BadInput as error:
                    if refuse is None:
                        raise
                    refuse(key, error)
                    continue
                check(key, found[key], self.runner.finished[-1].seconds)
            return found

        late = [key for key, (trial, _) in trials.items() if not self.runner.knows(trial)]
        again = all(self.runner.has_failed(trials[key][0]) for key in late)
        again = again or (refuse is not None and len(late) < len(trials))  # what was refused is in no trial log
        found = in_turn(anew=not again)
        return in_turn(anew=True) if again and any(isinstance(found.get(key), Measured) for key in late) else found

    def run(self, trial: Trial, label: str, *, anew: bool = False) -> Outcome:
        """Return a window's outcome; what others spoiled is read again."""
        for attempt in range(ATTEMPTS):
            outcome = self.runner.run(trial, label + (f", try {attempt + 1}" if attempt else ""), anew=anew)
            self.seconds += self.runner.finished[-1].seconds
            if not isinstance(outcome, Contaminated):
                break
        self.windows += isinstance(outcome, Measured)
        return outcome


def could_not_measure(what: str, outcome: Outcome, runner: TrialRunner) -> Undecided:
    """Return the error that a trial came to nothing that could be compared."""
    detail = "" if isinstance(outcome, Measured) else outcome.detail
    return Undecided(
        f"{what} was not measured ({describe(outcome)}):\n{detail}".rstrip(),
        next_step=f"Mend that and run the same command: it resumes from {runner.trial_log.directory}.",
    )


def check_loss(names: tuple[str, str], train: Callable[[str], Outcome]) -> LossVerdict:
    """Train in both ways from one start on the same rows, the reference first; return whether they learn the same."""
    every: list[tuple[float, ...]] = []
    for name in names:
        outcome = train(name)
        if not isinstance(outcome, Measured):
            return LossVerdict(equal=False, told=f"not checked: with {name} the run {describe(outcome)}")
        every.append(tuple(outcome.figures["losses"]))
        if len(every) == 1 and (nothing := fell_too_little(every[0], name)) is not None:
            return nothing
    return compare_losses(every[0], every[1], names)


def turn(number: int, keys: Sequence[Key]) -> list[Key]:
    """Return the order of a round: backwards if it is odd."""
    return list(keys if number % 2 == 0 else reversed(keys))
