"""Running of trials, or reuse of their results from the trial log.

And timed windows in rounds.

The windows of a round are interleaved, so that slow changes of a machine affect all of
them; every other round runs backwards, so that a drift within rounds cancels too. A
round is reused from the trial log completely or not at all.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from autotune.base.clock import Clock
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
from autotune.trials.fork_server import Machine
from autotune.trials.trial_log import TrialLog, read_trial_records
from autotune.trials.values import (
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
"""Time for the rest of a job after its last trial, in seconds."""
ATTEMPTS = 3
"""Attempts at a timed window that other processes or faults disturb."""
Key = TypeVar("Key")
Run = Callable[[Trial], Outcome]


@dataclass(slots=True, kw_only=True)
class TrialRunner:
    """Runner of trials, once per trial log: each result is on disk before the next trial starts."""

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
        for record in read_trial_records(self.trial_log.directory)[0]:
            if record.site == self.site:
                self._remember(record)

    def knows(self, trial: Trial) -> bool:
        """Return whether the trial was measured before."""
        return trial.key in self._known

    def has_failed(self, trial: Trial) -> bool:
        """Return whether the trial was run before without a result that is taken from the trial log."""
        return trial.key in self._failed and trial.key not in self._known

    def run(
        self,
        trial: Trial,
        label: str,
        *,
        anew: bool = False,
        timed: bool = False,
        by: Run | None = None,
    ) -> Outcome:
        """Return the trial's outcome: measured now, or, unless ``anew``, from the trial log.

        ``timed`` is True if a rate is taken from a ``step``; ``RATE_JOBS`` always
        measure one. ``by`` is run instead. Raise ``OutOfTime`` if it is likely to end
        after ``budget_ends_s``, ``StartAgain`` if it may exceed ``ends_s``. Raise
        ``Undecided`` for a rate that the GPU cannot reach, ``MachineLacks`` for any of
        a pretended one.
        """
        here = self.made_on if timed or trial.job in RATE_JOBS else None
        if here is not None:
            check_real(here.gpu_name, here.driver, label)
        done = None if anew else self._known.get(trial.key)
        if done is not None and here is not None and isinstance(done.outcome, Measured):
            done = (
                done
                if is_possible(here.gpu_name, rates_of_trial(trial, done.outcome))
                else None
            )
        self.on_trial(label, None)
        if done is None:
            self._check_time(trial, label)
            started_s = self.clock.monotonic_s()
            outcome = (by or self.machine.run)(trial)
            if isinstance(outcome, Measured) and here is not None:
                check_rates(here.gpu_name, rates_of_trial(trial, outcome))
            # Rounded as in the trial log, so that decisions by time are the same when
            # it is read back.
            seconds = round(self.clock.monotonic_s() - started_s, 3)
            record = TrialRecord(
                time_utc=self.clock.utc_now().isoformat(),
                site=self.site,
                made_on=self.made_on,
                label=label,
                outcome=asdict(outcome),
                seconds=seconds,
                **{name: getattr(trial, name) for name in ("key", "job", "measured")},
            )
            self.trial_log.append(record.model_dump(mode="json"))
            self._remember(record)
            done = FinishedTrial(
                trial=trial,
                outcome=outcome,
                seconds=seconds,
                label=label,
                from_trial_log=False,
            )
        done = replace(done, trial=trial, label=label)
        self.finished.append(done)
        self.on_finished(done)
        self.on_trial(label, done.outcome)
        return done.outcome

    def require_measured(self, what: str, outcome: Outcome) -> Measured:
        """Return the outcome; raise ``Undecided`` if the trial has no figures."""
        if isinstance(outcome, Measured):
            return outcome
        told = f"{what} could not be measured ({describe(outcome)}):\n{outcome.detail}".rstrip()
        next_step = (
            "Fix the cause and run the same command again: it resumes from"
            f" {self.trial_log.directory}."
        )
        raise Undecided(told, next_step=next_step)

    @property
    def pretended(self) -> bool:
        """True if the GPU is a pretended one, on which only memory can be measured."""
        return self.made_on is not None and is_pretended(self.made_on.driver)

    @property
    def seconds(self) -> float:
        """Time of all finished trials, those from the trial log included."""
        return sum(done.seconds for done in self.finished)

    def _check_time(self, trial: Trial, label: str) -> None:
        now_s, place = self.clock.utc_now().timestamp(), self.trial_log.directory
        if self.budget_ends_s is not None:
            left_s = self.budget_ends_s - now_s
            usual_s = statistics.median(
                [done.seconds for done in self.finished if not done.from_trial_log]
                or [0.0]
            )
            if left_s < usual_s:
                raise OutOfTime(
                    f"{max(0.0, left_s):.0f} s are left, but the next trial ({label})"
                    f" takes about {usual_s:.0f} s",
                    next_step=(
                        "Run it again with a longer --time-limit: it resumes from"
                        f" {place}."
                    ),
                )
        if (
            self.ends_s is not None
            and self.ends_s - now_s < trial.timeout_s + LEAVING_S
        ):
            raise StartAgain(
                f"the job ends in {max(0.0, self.ends_s - now_s):.0f} s, but the next"
                f" trial ({label}) may take {trial.timeout_s:g} s, plus {LEAVING_S:g} s"
                f" to exit; {len(self.finished)} results are in {place}",
                next_step=(
                    "Run the same command again: it resumes. A shorter --trial-timeout"
                    " uses more of the job."
                ),
            )

    def _remember(self, record: TrialRecord) -> None:
        """Keep the record.

        Only figures and out of memory are reused, other failures are tried again.
        """
        done = record.finished()
        if isinstance(done.outcome, Measured | OutOfMemory):
            self._known[record.key] = done
        else:
            self._failed.add(record.key)


@dataclass(slots=True, kw_only=True)
class Rounds:
    """Measurement of timed windows, with their number and time."""

    runner: TrialRunner
    windows: int = 0
    """Number of windows that gave figures."""
    seconds: float = 0.0
    """Time of all windows, those from the trial log included."""

    @property
    def taken(self) -> dict[str, Any]:
        """Windows and seconds, in the form of the evidence."""
        return {"windows": self.windows, "seconds": round(self.seconds, 3)}

    def read(
        self,
        number: int,
        trials: Mapping[Key, tuple[Trial, str]],
        check: Callable[[Key, Outcome, float], None],
        refuse: Callable[[Key, BadInput], None] | None = None,
    ) -> dict[Key, Outcome]:
        """Return the outcomes of a round; ``trials`` are windows with their labels.

        Windows that failed in a logged round are tried again; if one succeeds, the
        whole round is measured again. ``check`` gets each outcome with its seconds, and
        may raise; ``refuse``, if given, errors of unusable input.
        """

        def measured(*, anew: bool) -> dict[Key, Outcome]:
            found = {}
            for key in list(trials)[:: -1 if number % 2 else 1]:
                try:
                    found[key] = self.run(*trials[key], anew=anew)
                except BadInput as error:
                    if refuse is None:
                        raise
                    refuse(key, error)
                    continue
                check(key, found[key], self.runner.finished[-1].seconds)
            return found

        late = [
            key for key, (trial, _) in trials.items() if not self.runner.knows(trial)
        ]
        again = all(self.runner.has_failed(trials[key][0]) for key in late)
        # Rejected windows are not logged.
        again = again or (refuse is not None and len(late) < len(trials))
        found = measured(anew=not again)
        return (
            measured(anew=True)
            if again and any(isinstance(found.get(key), Measured) for key in late)
            else found
        )

    def run(self, trial: Trial, label: str, *, anew: bool = False) -> Outcome:
        """Return a window's outcome; a disturbed window is measured again."""
        for attempt in range(ATTEMPTS):
            outcome = self.runner.run(
                trial,
                label + (f", attempt {attempt + 1}" if attempt else ""),
                anew=anew,
            )
            self.seconds += self.runner.finished[-1].seconds
            if outcome.kind != "contaminated":
                break
        self.windows += isinstance(outcome, Measured)
        return outcome


def check_loss(names: tuple[str, str], train: Callable[[str], Outcome]) -> LossVerdict:
    """Train with both settings from one start on the same data, the reference first, and compare what they learn."""
    every: list[tuple[float, ...]] = []
    for name in names:
        outcome = train(name)
        if not isinstance(outcome, Measured):
            return LossVerdict(
                equal=False,
                message=(
                    f"not checked: the run with {name} failed ({describe(outcome)})"
                ),
            )
        every.append(tuple(outcome.figures["losses"]))
        if len(every) == 1 and (nothing := fell_too_little(every[0], name)) is not None:
            return nothing
    return compare_losses(every[0], every[1], names)
