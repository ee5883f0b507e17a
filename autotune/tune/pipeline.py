"""Complete tuning: the phases of all subjects in their order, on one machine.

The order is that of arXiv 2509.05258, footnote 2. What a phase does with a subject is
behind ``TunedSubject``. Every phase keeps its trials in a
trial log and its decision in the profile, so that the same command resumes.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from autotune.base.clock import Clock, SystemClock
from autotune.base.log import LOG
from autotune.base.units import format_seconds
from autotune.confirm.decide import confirm_window_s, training_s
from autotune.errors import (
    AutotuneError,
    ExceedsMemory,
    NotCheckable,
    OutOfTime,
    Undecided,
)
from autotune.machine.measured_device import DeviceChoice
from autotune.network.stage import nodes_here
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import read_profile
from autotune.report.stage import build_report
from autotune.trials.decide.least_time import (
    ASSUMED_TRIAL_S,
    StageName,
    least_s,
    least_time_text,
)
from autotune.trials.trial_log import report_directory
from autotune.tune.decide import share_s
from autotune.tune.live_view import TuningView
from autotune.tune.next_steps import next_steps
from autotune.tune.subjects import SubjectsToTune, TunedSubject
from autotune.tune.values import BUDGET_WEIGHTS, Stage, TuningResult

ORDER: tuple[StageName, ...] = get_args(StageName)
OF_ONE_SUBJECT = (ExceedsMemory, Undecided)
"""Errors of one subject, after which the others are still tuned."""
REPORT = "report.html"
OVERRUN_SHARE = 0.2
"""Longest overrun of a phase that has begun, as a share of the time budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """Subjects to tune, with the time and the phases for them."""

    subjects: SubjectsToTune
    """Models, or your own code."""
    out: Path | None
    """Directory of the profiles, or a ``.toml`` file for a single subject."""
    device: DeviceChoice
    minutes: float
    """Time budget of the whole tuning, in minutes; phases share the time after the
    probes."""
    skip: frozenset[StageName] = frozenset()
    nodes: int = 1
    """Nodes of the later training; gradient synchronisation is measured on those that
    this job has."""


@dataclass(slots=True, kw_only=True)
class Tuning:
    """Tuning in progress."""

    request: TuneRequest
    clock: Clock = field(default_factory=SystemClock)
    stages: list[Stage] = field(init=False)
    view: TuningView = field(init=False)
    waited_s: float = 0.0
    failed: list[AutotuneError] = field(default_factory=list)
    report: Path | None = None
    _trial_s: float = 0.0
    """Usual seconds of a trial besides its measurement."""
    _subjects: dict[str, TunedSubject] = field(default_factory=dict)
    """Subjects by name; empty until a machine is open."""

    def __post_init__(self) -> None:
        names = self.request.subjects.names
        self.stages = [
            Stage(name=stage, model=name) for stage in ORDER[:2] for name in names
        ]
        self.stages += [
            Stage(name=stage, model=name) for name in names for stage in ORDER[2:-1]
        ]
        self.stages.append(Stage(name="report", model=""))
        self.view = TuningView(clock=self.clock, budget_s=60 * self.request.minutes)

    def run(self) -> TuningResult:
        """Run all phases.

        It raises the error of a phase that failed in a way that affects all subjects.
        """
        # Fails before anything is started.
        profile_paths(self.request.out, self.request.subjects.names, "")
        with self.view.open():
            try:
                self._run_phases()
            except KeyboardInterrupt:
                self.view.interrupt()
                raise
        return TuningResult(
            profiles=tuple(str(path) for path in self.tuned),
            report=None if self.report is None else str(self.report),
            stages=tuple(self.stages),
            seconds=round(self.view.elapsed_s, 3),
            seconds_in_children=round(self.waited_s, 3),
            next_steps=next_steps(self.tuned, nodes=self.request.nodes),
        )

    def _run_phases(self) -> None:
        request = self.request
        with request.subjects.open(
            request.device, request.out, self.view, probed="probe" in request.skip
        ) as opened:
            self._trial_s = ASSUMED_TRIAL_S[opened.bench.site.device]
            self._subjects = {subject.name: subject for subject in opened.subjects}
            # Now, so that the others share all of the time.
            for stage in self.stages:
                if why := self._why_not(stage):
                    stage.status, stage.summary = "skipped", why
            self.view.planned = [stage for stage in self.stages if not stage.over]
            self._tell_least()
            for stage in self.stages[:-1]:
                self._do(stage, self._measure)
        self.waited_s += opened.bench.server.waited_s
        self._do(self.stages[-1], self._report)

    @property
    def has_saved(self) -> bool:
        """True if there is something to resume.

        This is a phase that is done, or that may have trials in the trial log.
        """
        return any(stage.status in ("running", "done") for stage in self.stages)

    def _tell_least(self) -> None:
        """Write the minimum time of the phases before they begin.

        It warns if the time exceeds the budget.
        """
        parts: dict[StageName, float] = {stage.name: 0.0 for stage in self.view.planned}
        for stage in self.view.planned:
            parts[stage.name] += self._least_s(stage)
        text = least_time_text(
            "tune", parts, self.view.budget_s, "phases without time are skipped"
        )
        LOG.info("%s", text.rstrip())

    def _least_s(self, stage: Stage) -> float:
        """Return the approximate minimum seconds of a phase."""
        window_s = self.request.subjects.window_s
        if stage.name == "confirm":
            window_s = confirm_window_s(window_s)
        return least_s(stage.name, self._trial_s, window_s)

    def _do(self, stage: Stage, work: Callable[[Stage], str]) -> None:
        """Run a phase, or record why it is skipped."""
        if stage.over:
            return
        left_s = self.view.budget_s - self.view.elapsed_s
        least, why = self._least_s(stage), self._why_not(stage)
        if not why and stage.name in BUDGET_WEIGHTS and left_s < least:
            why = (
                f"requires at least {format_seconds(least)}, and"
                f" {format_seconds(max(0.0, left_s))} of "
            )
            why += f"--time-limit {self.request.minutes:g}min are left"
        if why:
            stage.status, stage.summary = "skipped", why
            self.view.end(stage)
            return
        share = share_s(self.stages, stage, left_s)
        stage.budget_s = None if share is None else max(share, least)
        self.view.begin(stage)
        try:
            stage.summary = work(stage)
            stage.status = "done"
        except BaseException as error:
            reason = getattr(error, "message", str(error)) or type(error).__name__
            stage.status, stage.summary = "failed", reason.splitlines()[0]
            if isinstance(error, KeyboardInterrupt):
                stage.status = "interrupted"
                stage.summary = "its finished trials are kept"
                # Ending the processes may take seconds.
                self.view.interrupt()
                raise
            if isinstance(error, OutOfTime) and stage.name in BUDGET_WEIGHTS:
                stage.status = "skipped"  # as one that had no time to begin
            elif isinstance(error, NotCheckable):
                # Nothing failed: the phase requires what is not known here.
                stage.status = "skipped"
                name = f"{stage.name} {stage.model}".rstrip()
                LOG.info("tune: %s: next: %s", name, error.next_step)
            elif isinstance(error, OF_ONE_SUBJECT):
                self.failed.append(error)
            else:
                raise
        finally:
            self.view.end(stage)

    def _why_not(self, stage: Stage) -> str:
        """Return the reason for skipping a phase; empty if there is none."""
        if stage.name in self.request.skip:
            return (
                "requires --explore"
                if stage.name == "explore"
                else "left out by --skip"
            )
        if stage.name == "report" and not self.tuned:
            return "no profile was written"
        failed = {
            (one.model, one.name) for one in self.stages if one.status == "failed"
        }
        if stage.name in ORDER[2:-1] and any(
            (stage.model, name) in failed for name in ORDER[:2]
        ):
            return "requires a probed micro-batch"
        subject = self._subjects.get(stage.model)
        return "" if subject is None else subject.missing(stage.name, self._nodes)

    @property
    def _nodes(self) -> int:
        """Number of this job's nodes to measure on, at most those of the training."""
        return min(self.request.nodes, nodes_here())

    def _measure(self, stage: Stage) -> str:
        """Run a phase of a subject, and return its result in words."""
        subject = self._subjects[stage.model]
        if stage.name == "estimate":
            return subject.estimate()
        if stage.name == "probe":
            return self._probe(subject)
        assert stage.budget_s is not None
        stored = read_profile(subject.path)
        require_local_probe(stored)
        request = subject.sweep_request(stage.budget_s, self._ends_s(1 + OVERRUN_SHARE))
        if stage.name == "explore":
            return subject.explore(stored, request)
        if stage.name == "workers":
            return subject.workers(stored, request)
        if stage.name == "confirm":
            return subject.confirm(
                stored,
                replace(request, window_s=confirm_window_s(request.window_s)),
                training_s(self.view.budget_s, len(self._subjects)),
            )
        if stage.name == "baseline":
            return subject.baseline(stored, request)
        words, waited_s = subject.network(stored, request, self._nodes)
        self.waited_s += waited_s
        return words

    def _ends_s(self, share: float = 1.0) -> float:
        """Return when a share of the time budget is over, in seconds since 1970."""
        return (
            self.clock.utc_now().timestamp()
            + share * self.view.budget_s
            - self.view.elapsed_s
        )

    def _probe(self, subject: TunedSubject) -> str:
        probed = subject.probe(self._ends_s())
        if probed.trial_s:
            self._trial_s = statistics.median(probed.trial_s)
        return probed.summary

    def _report(self, _: Stage) -> str:
        profiles, subjects = self.tuned, self.request.subjects
        self.report = report_directory(profiles[0], subjects.reports) / REPORT
        build_report(profiles, subjects.reports, self.report, data=subjects.data)
        return str(self.report)

    @property
    def tuned(self) -> list[Path]:
        """Profiles that this tuning wrote or resumed from."""
        without = {
            one.model
            for one in self.stages
            if one.status == "failed" and one.name in ORDER[:2]
        }
        return [
            subject.path
            for name, subject in self._subjects.items()
            if name not in without
        ]
