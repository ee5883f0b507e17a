"""Complete tuning: the phases of all models in their order, on one machine.

The order is that of arXiv 2509.05258, footnote 2. Every phase keeps its trials in a
trial log and its decision in the profile, so that the same command resumes.
"""

import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from autotune.base.clock import Clock, SystemClock
from autotune.base.defaults import WINDOW_S
from autotune.base.log import LOG
from autotune.base.units import format_bytes, format_count, format_seconds
from autotune.baseline.sections import gains
from autotune.baseline.stage import compare_recipes
from autotune.confirm.decide import confirm_window_s, confirmed_words, training_s
from autotune.confirm.stage import confirm_profile
from autotune.errors import (
    AutotuneError,
    ExceedsMemory,
    NotCheckable,
    OutOfTime,
    Undecided,
)
from autotune.evidence.probe import LOWER_BOUND
from autotune.machine.measured_device import DeviceChoice, MeasuredDevice
from autotune.memory.decide.throughput_dip import dip_words, fastest_point
from autotune.memory.estimate import CannotTrace, MemoryEstimate
from autotune.network.stage import nodes_here, tune_network
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import (
    StoredProfile,
    read_profile,
    read_trainer_profile,
)
from autotune.report.stage import build_report
from autotune.search.stage import explore_settings
from autotune.subjects.mlm.memory.probe import Probe, ProbeRequest
from autotune.subjects.mlm.memory.stage import check_budgets, prepare, probe_one
from autotune.subjects.mlm.workers.stage import count_workers
from autotune.trials.decide.least_time import (
    ASSUMED_TRIAL_S,
    StageName,
    least_s,
    least_time_text,
)
from autotune.trials.session import Session, open_session
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_log import report_directory
from autotune.tune.decide import share_s
from autotune.tune.live_view import TuningView
from autotune.tune.values import BUDGET_WEIGHTS, Stage, TuningResult
from trainer.formats.tables import read_json

ORDER: tuple[StageName, ...] = get_args(StageName)
OF_ONE_MODEL = (ExceedsMemory, Undecided, NotCheckable)
"""Errors of one model, after which the other models are still tuned."""
REPORT = "report.html"
OVERRUN_SHARE = 0.2
"""Longest overrun of a phase that has begun, as a share of the time budget."""
REPEATED_MINUTES = 2.0
"""Longest repeated phase after the network between nodes was measured, in minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """Models to tune, with the time and the phases for them."""

    probes: tuple[ProbeRequest, ...]
    """Probe requests, one for each model, with the same dataset, reports and time
    limit."""
    out: Path | None
    """Directory of the profiles, or a ``.toml`` file for a single model."""
    device: DeviceChoice
    minutes: float
    """Time budget of the whole tuning, in minutes; phases share the time after the
    probes."""
    skip: frozenset[StageName] = frozenset()
    nodes: int = 1
    """Nodes of the later training; gradient synchronisation is measured on those that
    this job has."""
    window_s: float = WINDOW_S
    study_file: Path | None = None
    """File to which phases write their Optuna studies; None for no file."""

    @property
    def models(self) -> list[str]:
        """Names of the models."""
        return [probe.config.model.name for probe in self.probes]


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
    _paths: dict[str, Path] = field(default_factory=dict)
    _prepared: dict[str, Probe] = field(default_factory=dict)
    _traced: dict[str, MemoryEstimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.request.models
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

        It raises the error of a phase that failed in a way that affects all models.
        """
        # Fails before anything is started.
        profile_paths(self.request.out, self.request.models, "")
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
        request, names = self.request, self.request.models
        with open_session(
            request.device, request.probes[0].data, check=self._check
        ) as opened:
            bench = replace(opened, display=self.view)
            self._trial_s = ASSUMED_TRIAL_S[bench.site.device]
            self._paths = dict(
                zip(
                    names,
                    profile_paths(request.out, names, bench.site.name),
                    strict=True,
                )
            )
            self._prepared = {
                one.config.model.name: prepare(bench, one) for one in request.probes
            }
            # Now, so that the others share all of the time.
            for stage in self.stages:
                if why := self._why_not(stage):
                    stage.status, stage.summary = "skipped", why
            self.view.planned = [stage for stage in self.stages if not stage.over]
            self._tell_least()
            for stage in self.stages[:-1]:
                self._do(stage, lambda stage: self._measure(bench, stage))
        self.waited_s += opened.server.waited_s
        self._do(self.stages[-1], self._report)

    def _check(self, site: MeasuredDevice) -> None:
        """Check that the request can be met.

        Raises:
            BadInput: If the device cannot meet the request, or a profile is missing
                that no probe writes.
        """
        check_budgets(self.request.probes, site)
        if "probe" in self.request.skip:
            for path in profile_paths(self.request.out, self.request.models, site.name):
                read_trainer_profile(path, "tune --skip probe")

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
        window_s = self.request.window_s
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
            elif isinstance(error, OF_ONE_MODEL):
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
        if (
            stage.name == "network"
            and self._prepared[stage.model].local_ranks * self._nodes < 2
        ):
            return "requires at least 2 ranks"
        return ""

    @property
    def _nodes(self) -> int:
        """Number of this job's nodes to measure on, at most those of the training."""
        return min(self.request.nodes, nodes_here())

    def _measure(self, bench: Session, stage: Stage) -> str:
        if stage.name == "estimate":
            return self._estimate(bench, stage)
        if stage.name == "probe":
            return self._probe(bench, stage)
        assert stage.budget_s is not None
        stored, asked = (
            read_profile(self._paths[stage.model]),
            self._prepared[stage.model].request,
        )
        require_local_probe(stored)
        request = SweepRequest(
            data=asked.data,
            reports=asked.reports,
            budget_s=stage.budget_s,
            window_s=self.request.window_s,
            trial_timeout_s=asked.trial_timeout_s,
            budget_ends_s=self._ends_s(1 + OVERRUN_SHARE),
            study_file=self.request.study_file,
        )
        if stage.name == "explore":
            return explore_settings(bench, stored, asked, request).choice
        if stage.name == "workers":
            found = count_workers(bench, stored, request)
            return f"{found.chosen} DataLoader workers: {found.choice}"
        if stage.name == "confirm":
            return self._confirm(bench, stored, request)
        if stage.name == "baseline":
            return "; ".join(gains(compare_recipes(bench, stored, request)))
        network, waited_s = tune_network(stored, request, self._nodes, bench.display)
        self.waited_s += waited_s
        return network.choice

    def _confirm(
        self, bench: Session, stored: StoredProfile, request: SweepRequest
    ) -> str:
        """Measure the tuned settings as training will run, and train for a moment."""
        confirmed = confirm_profile(
            bench,
            stored,
            replace(request, window_s=confirm_window_s(request.window_s)),
            training_s=training_s(self.view.budget_s, len(self.request.probes)),
        )
        return confirmed_words(confirmed)

    def _ends_s(self, share: float = 1.0) -> float:
        """Return when a share of the time budget is over, in seconds since 1970."""
        return (
            self.clock.utc_now().timestamp()
            + share * self.view.budget_s
            - self.view.elapsed_s
        )

    def _estimate(self, bench: Session, stage: Stage) -> str:
        probe = self._prepared[stage.model]
        if probe.overheads is None:
            return "left out by --skip"
        with bench.display.show(f"estimate {stage.model}") as update:
            update(0, None, "tracing, to predict its memory")
            try:
                found = self._traced[stage.model] = probe.trace(bench.machine)
            except CannotTrace as error:
                return error.message
        rows, tokens = (
            format_count(found.max_micro_batch_size),
            probe.config.seq_length_tokens,
        )
        return (
            f"{rows} sequences of {tokens} tokens predicted to fit"
            f" {format_bytes(probe.memory_budget_bytes)}"
        )

    def _probe(self, bench: Session, stage: Stage) -> str:
        path, traced = self._paths[stage.model], self._traced.get(stage.model)
        probed = probe_one(
            bench, self._prepared[stage.model], path, traced, self._ends_s()
        )
        fresh = [one.seconds for one in probed.trials if not one.from_trial_log]
        self._trial_s = statistics.median(fresh) if fresh else self._trial_s
        train, evidence = probed.profile.train, probed.evidence
        split = split_global_batch(
            train.global_batch_size, train.micro_batch_size, evidence.local_ranks
        )
        limit = ""
        if evidence.is_lower_bound:
            limit = f" ({LOWER_BOUND})"
        elif evidence.infeasible_min is not None:
            limit = f", {evidence.infeasible_min:,} run out of memory"
        batch = split.words(evidence.local_ranks)
        words = f"{evidence.feasible_max:,} sequences fit{limit}"
        if evidence.curve:
            words += f"; fastest {fastest_point(evidence.curve).size:,}"
        words += f"; global batch of {batch}"
        return words if evidence.dip is None else f"{words}; {dip_words(evidence.dip)}"

    def _report(self, _: Stage) -> str:
        profiles, probe = self.tuned, self.request.probes[0]
        self.report = report_directory(profiles[0], probe.reports) / REPORT
        build_report(profiles, probe.reports, self.report, data=probe.data)
        return str(self.report)

    @property
    def tuned(self) -> list[Path]:
        """Profiles that this tuning wrote or resumed from."""
        without = {
            one.model
            for one in self.stages
            if one.status == "failed" and one.name in ORDER[:2]
        }
        return [path for name, path in self._paths.items() if name not in without]


def next_steps(profiles: Sequence[Path], *, nodes: int) -> tuple[str, ...]:
    """Return the commands to run next with tuned profiles, in order.

    They are for a training on ``nodes`` nodes.
    """
    if not profiles:
        return ()
    first = shlex.quote(str(profiles[0]))
    network = read_profile(profiles[0]).profile.evidence.network
    approve = (
        f"autotune profile approve {first} --by NAME  # after you have read the report"
    )
    steps = [f"autotune advise {first}", approve]
    if nodes < 2:
        return (*steps, f"autotune train {first}")
    if network is None or network.nodes < 2:
        steps.append(
            f"autotune network {first} --slurm  # the network between nodes was not"
            " measured"
        )
    steps.append(f"autotune plan {first} --nodes {nodes}")
    return (*steps, f"autotune train {first} --nodes {nodes} --slurm")


def measure_between_nodes(found_by: Path, request: SweepRequest) -> TuningResult:
    """Measure the network of each profile in ``found_by``, and report.

    It takes the requested time. Phases that measure the tuned settings are repeated if
    the network changed these.
    """
    clock, waited_s = SystemClock(), 0.0
    began_s = clock.monotonic_s()
    found = read_json(found_by)
    paths = [Path(one) for one in found["profiles"]]
    for path in paths:
        waited_s += tune_network(read_profile(path), request, nodes_here())[1]
        stored = read_profile(path)
        evidence = stored.profile.evidence
        dropped = [
            name for name in found["repeated"] if getattr(evidence, name) is None
        ]
        if not dropped:
            continue
        short = replace(request, budget_s=min(60 * REPEATED_MINUTES, request.budget_s))
        with open_session(stored.profile.train.device, request.data) as bench:
            if "confirm" in dropped:
                confirm_profile(
                    bench,
                    stored,
                    replace(short, window_s=confirm_window_s(short.window_s)),
                    training_s=training_s(short.budget_s, models=1),
                )
                stored = read_profile(path)
            if "baseline" in dropped:
                compare_recipes(bench, stored, short)
        waited_s += bench.server.waited_s
    if found["report"] is not None:
        build_report(paths, request.reports, Path(found["report"]), data=request.data)
    return TuningResult(
        profiles=tuple(found["profiles"]),
        report=found["report"],
        stages=(),
        seconds=round(clock.monotonic_s() - began_s, 3),
        seconds_in_children=round(waited_s, 3),
        next_steps=next_steps(paths, nodes=nodes_here()),
    )
