"""Models that the bundled trainer trains, as subjects of a tuning."""

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.base.clock import SystemClock
from autotune.base.defaults import WINDOW_S
from autotune.base.units import format_bytes, format_count
from autotune.baseline.sections import gains
from autotune.baseline.stage import compare_recipes
from autotune.confirm.decide import confirm_window_s, confirmed_words, training_s
from autotune.confirm.stage import confirm_profile
from autotune.confirm.trainer_training import TrainerTraining
from autotune.evidence.probe import LOWER_BOUND
from autotune.machine.measured_device import DeviceChoice, MeasuredDevice
from autotune.memory.decide.throughput_dip import dip_words, fastest_point
from autotune.memory.estimate import CannotTrace, MemoryEstimate
from autotune.memory.probe_limits import check_budgets
from autotune.memory.stage import probe_one
from autotune.network.stage import nodes_here, tune_network
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import (
    StoredProfile,
    read_profile,
    read_trainer_profile,
)
from autotune.report.stage import build_report
from autotune.search.stage import explore
from autotune.search.trainer_step import TrainerStep
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.mlm.baselines.subject import WORDS
from autotune.subjects.mlm.memory.probe import Probe, ProbeRequest
from autotune.subjects.mlm.memory.stage import (
    prepare,
    requested_subject,
)
from autotune.subjects.mlm.workers.stage import count_workers
from autotune.subjects.registry import profile_subject
from autotune.trials.decide.least_time import StageName
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Display
from autotune.tune.subjects import OpenedSubjects, ProbeResult
from autotune.tune.values import TuningResult
from trainer.formats.tables import read_json

REPEATED_MINUTES = 2.0
"""Longest repeated phase after the network between nodes was measured, in minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsToTune:
    """Models to tune on one dataset."""

    probes: tuple[ProbeRequest, ...]
    """Probe requests, one for each model, with the same dataset, reports and time
    limit."""
    window_s: float = WINDOW_S
    study_file: Path | None = None
    """File to which phases write their Optuna studies; None for no file."""

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        return [probe.config.model.name for probe in self.probes]

    @property
    def reports(self) -> Path:
        """Directory of the reports, which has the trial logs."""
        return self.probes[0].reports

    @property
    def data(self) -> Path:
        """Directory of the dataset."""
        return self.probes[0].data

    @contextlib.contextmanager
    def open(
        self, device: DeviceChoice, out: Path | None, display: Display, *, probed: bool
    ) -> Iterator[OpenedSubjects]:
        """Open a machine, as for ``SubjectsToTune``."""

        def check(site: MeasuredDevice) -> None:
            check_budgets(self.probes, site)
            for path in profile_paths(out, self.names, site.name) if probed else ():
                read_trainer_profile(path, "tune --skip probe")

        first = requested_subject(self.probes[0])
        with open_subject(device, first, self.data, check=check) as opened:
            bench = replace(opened, display=display)
            paths = profile_paths(out, self.names, bench.site.name)
            models = []
            for path, request in zip(paths, self.probes, strict=True):
                probe = prepare(bench, request)
                models.append(
                    TunedModel(
                        bench=replace(bench, subject=probe.subject),
                        path=path,
                        prepared=probe,
                        tuned=self,
                    )
                )
            yield OpenedSubjects(bench=bench, subjects=tuple(models))

    def next_steps(self, profiles: Sequence[Path], nodes: int) -> tuple[str, ...]:
        """Return the commands to run next with tuned profiles, in order."""
        return next_steps(profiles, nodes=nodes)


@dataclass(slots=True, kw_only=True)
class TunedModel:
    """A model on a machine, as a subject of a tuning."""

    bench: SubjectBench
    """Machine on which its trials run."""
    path: Path
    """Path of its profile."""
    prepared: Probe
    """The probe, with the defaults of the site."""
    tuned: ModelsToTune
    """The request that it belongs to."""
    _traced: MemoryEstimate | None = field(default=None)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.prepared.config.model.name

    def missing(self, phase: StageName, nodes: int) -> str:
        """Return the reason why the model cannot have a phase; empty if it can."""
        if phase == "network" and self.prepared.local_ranks * nodes < 2:
            return "requires at least 2 ranks"
        return ""

    def estimate(self) -> str:
        """Predict the largest micro-batch from a trace."""
        probe = self.prepared
        if probe.overheads is None:
            return "left out by --skip"
        with self.bench.display.show(f"estimate {self.name}") as update:
            update(0, None, "tracing, to predict its memory")
            try:
                self._traced = probe.trace(self.bench.machine)
            except CannotTrace as error:
                return error.message
        rows, tokens = (
            format_count(self._traced.max_micro_batch_size),
            probe.config.seq_length_tokens,
        )
        return (
            f"{rows} sequences of {tokens} tokens predicted to fit"
            f" {format_bytes(probe.memory_budget_bytes)}"
        )

    def probe(self, ends_s: float) -> ProbeResult:
        """Find the largest micro-batch, and write the profile."""
        probed = probe_one(
            self.bench, self.prepared, self.path, self._traced, ends_s=ends_s
        )
        train, evidence = probed.profile.train, probed.probe
        split = split_global_batch(
            train.global_batch_size, train.micro_batch_size, evidence.local_ranks
        )
        limit = ""
        if evidence.is_lower_bound:
            limit = f" ({LOWER_BOUND})"
        elif evidence.infeasible_min is not None:
            limit = f", {evidence.infeasible_min:,} run out of memory"
        words = f"{evidence.feasible_max:,} sequences fit{limit}"
        if evidence.curve:
            words += f"; fastest {fastest_point(evidence.curve).size:,}"
        words += f"; global batch of {split.words(evidence.local_ranks)}"
        if evidence.dip is not None:
            words += f"; {dip_words(evidence.dip)}"
        return ProbeResult(
            summary=words,
            trial_s=tuple(
                trial.seconds for trial in probed.trials if not trial.from_trial_log
            ),
        )

    def sweep_request(self, budget_s: float, ends_s: float) -> SweepRequest:
        """Return the request for windows of a phase."""
        probe = self.prepared.limits
        return SweepRequest(
            data=probe.data,
            reports=probe.reports,
            budget_s=budget_s,
            window_s=self.tuned.window_s,
            trial_timeout_s=probe.trial_timeout_s,
            budget_ends_s=ends_s,
            study_file=self.tuned.study_file,
        )

    def explore(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Search the settings of the step jointly."""
        step = TrainerStep(
            bench=self.bench,
            stored=stored,
            probe_request=self.prepared.limits,
            sweep=request,
        )
        return explore(step).choice

    def workers(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Find the fewest DataLoader workers."""
        found = count_workers(self.bench, stored, request)
        return f"{found.chosen} DataLoader workers: {found.choice}"

    def network(
        self, stored: StoredProfile, request: SweepRequest, nodes: int
    ) -> tuple[str, float]:
        """Find the fastest gradient synchronisation on this job's nodes."""
        network, waited_s = tune_network(stored, request, nodes, self.bench.display)
        return network.choice, waited_s

    def confirm(
        self, stored: StoredProfile, request: SweepRequest, training_s: float
    ) -> str:
        """Measure the tuned settings as training will run, and train for a moment."""
        training = TrainerTraining.of(self.bench, stored, request)
        confirmed = confirm_profile(
            training, budget_s=request.budget_s, training_s=training_s
        )
        return confirmed_words(confirmed)

    def baseline(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Compare the tuned settings with untuned ones.

        Other trainers are left to ``autotune baseline``: they would take most of the
        time budget.
        """
        compared = compare_recipes(self.bench, stored, request, left_out=WORDS)
        return "; ".join(gains(compared))


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
    paths = [Path(path) for path in found["profiles"]]
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
        with open_subject(
            stored.profile.device,
            profile_subject(stored.profile, request.data),
            request.data,
        ) as bench:
            if "confirm" in dropped:
                confirm_profile(
                    TrainerTraining.of(
                        bench,
                        stored,
                        replace(short, window_s=confirm_window_s(short.window_s)),
                    ),
                    budget_s=short.budget_s,
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
