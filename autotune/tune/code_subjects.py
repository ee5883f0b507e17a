"""Your own training code, as subjects of a tuning."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.base.defaults import WINDOW_S
from autotune.base.files import write_atomically
from autotune.base.units import format_bytes
from autotune.baseline.sections import gains
from autotune.baseline.stage import compare_recipes
from autotune.confirm.code_training import CodeTraining
from autotune.confirm.decide import confirmed_words
from autotune.confirm.stage import confirm_profile
from autotune.errors import BadInput
from autotune.evidence.probe import LOWER_BOUND
from autotune.machine.measured_device import DeviceChoice, MeasuredDevice
from autotune.memory.code_probe import CodeProbe, CodeProbeRequest, prepare_code
from autotune.memory.decide.throughput_dip import fastest_point
from autotune.memory.estimate import CannotTrace, MemoryEstimate
from autotune.memory.probe_limits import check_budgets
from autotune.memory.stage import probe_one
from autotune.network.stage import measure_own_network
from autotune.profiles.decide.follow_up import command
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import StoredProfile, read_profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.search.code_step import CodeStep
from autotune.search.stage import explore
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.subject import Subject
from autotune.trials.decide.least_time import StageName
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Display
from autotune.tune.subjects import OpenedSubjects, ProbeResult
from autotune.workers.code_stage import sweep_into


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeToTune:
    """Your functions, with each combination of their arguments."""

    probes: tuple[CodeProbeRequest, ...]
    """Probe requests, one for each combination, with the same limits."""
    window_s: float = WINDOW_S
    study_file: Path | None = None
    """File to which phases write their Optuna studies; None for no file."""

    @property
    def names(self) -> list[str]:
        """Short name of each combination."""
        return [probe.subject.name for probe in self.probes]

    @property
    def reports(self) -> Path:
        """Directory of the reports, which has the trial logs."""
        return self.probes[0].reports

    @property
    def data(self) -> None:
        """None: your code has its own data."""
        return None

    @contextlib.contextmanager
    def open(
        self, device: DeviceChoice, out: Path | None, display: Display, *, probed: bool
    ) -> Iterator[OpenedSubjects]:
        """Open a machine, as for ``SubjectsToTune``."""

        def check(site: MeasuredDevice) -> None:
            check_budgets(self.probes, site)
            for path in profile_paths(out, self.names, site.name) if probed else ():
                read_profile(path)

        first = self.probes[0]
        with open_subject(
            device,
            first.subject,
            import_timeout_s=first.trial_timeout_s,
            check=check,
        ) as opened:
            bench = replace(opened, display=display)
            paths = profile_paths(out, self.names, bench.site.name)
            subjects = []
            for path, probe in zip(paths, self.probes, strict=True):
                subject_bench = replace(bench, subject=probe.subject)
                subjects.append(
                    TunedCode(
                        bench=subject_bench,
                        path=path,
                        prepared=prepare_code(subject_bench, probe),
                        tuned=self,
                    )
                )
            yield OpenedSubjects(bench=bench, subjects=tuple(subjects))

    def next_steps(self, profiles: Sequence[Path], nodes: int) -> tuple[str, ...]:
        """Return the commands to run next with tuned profiles, in order."""
        if not profiles:
            return ()
        first = profiles[0]
        values = command("profile show", first)
        approve = command("profile approve", first, by="NAME")
        return (
            f"{values}  # the values to use in your code, and why",
            command("advise", first),
            f"{approve}  # after you have read the report",
        )


@dataclass(slots=True, kw_only=True)
class TunedCode:
    """Your functions on a machine, as a subject of a tuning."""

    bench: SubjectBench
    """Machine on which their trials run."""
    path: Path
    """Path of the profile."""
    prepared: CodeProbe
    """The probe."""
    tuned: CodeToTune
    """The request that it belongs to."""
    _traced: MemoryEstimate | None = field(default=None)

    @property
    def request(self) -> CodeProbeRequest:
        """The request for its probe."""
        return self.prepared.limits

    @property
    def subject(self) -> Subject:
        """Your functions with their arguments."""
        return self.request.subject

    @property
    def name(self) -> str:
        """Short name."""
        return self.subject.name

    def missing(self, phase: StageName, nodes: int) -> str:
        """Return the reason why your code cannot have a phase; empty if it can."""
        if phase == "network" and (self.request.ranks or 1) < 2:
            return "requires at least 2 ranks"
        if phase == "estimate" and self.bench.model is None:
            return "the module of the step has no build_model to trace"
        if phase == "explore" and not self._searched_names():
            return "no settings to vary: --vary NAME=V1,V2"
        if phase == "workers" and not self._has_loader:
            return "requires a loader: --loader MODULE:build_loader"
        if phase == "confirm" and not (self._has_loader or self._trains()):
            return "requires a loader, or a function that trains"
        return ""

    @property
    def _has_loader(self) -> bool:
        return self.subject.loader({}) is not None

    def _trains(self) -> bool:
        """Return whether the step is a training loop; True before the probe."""
        if not self.path.is_file():
            return True
        probe = read_profile(self.path).profile.evidence.probe
        return probe is None or probe.trains

    def _searched_names(self) -> list[str]:
        """Return the declared settings that you did not fix as arguments."""
        fixed = self.subject.table().get("arguments", {})
        return [
            setting.name
            for setting in self.subject.settings()
            if setting.name not in fixed
        ]

    def estimate(self) -> str:
        """Predict the largest size from a trace of ``build_model``."""
        probe = self.prepared.size_probe()
        if probe.trace is None:
            return "left out by --skip"
        with self.bench.display.show(f"estimate {self.name}") as update:
            update(0, None, "tracing, to predict its memory")
            try:
                self._traced = probe.estimate(self.bench.machine)
            except (CannotTrace, BadInput) as error:
                return error.message
        size = probe.words(self._traced.max_micro_batch_size)
        return f"{size} predicted to fit {format_bytes(probe.memory_budget_bytes)}"

    def probe(self, ends_s: float) -> ProbeResult:
        """Find the largest size, and write the profile."""
        written = probe_one(
            self.bench, self.prepared, self.path, self._traced, ends_s=ends_s
        )
        evidence, subject = written.probe, written.profile.subject
        limit = ""
        if evidence.is_lower_bound:
            limit = f" ({LOWER_BOUND})"
        elif evidence.infeasible_min is not None:
            limit = f", {evidence.infeasible_min:,} runs out of memory"
        words = f"{subject.size_words(evidence.feasible_max)} fits{limit}"
        if evidence.curve:
            words += f"; fastest {fastest_point(evidence.curve).size:,}"
        return ProbeResult(
            summary=words,
            trial_s=tuple(
                trial.seconds for trial in written.trials if not trial.from_trial_log
            ),
        )

    def sweep_request(self, budget_s: float, ends_s: float) -> SweepRequest:
        """Return the request for windows of a phase."""
        return SweepRequest(
            reports=self.request.reports,
            budget_s=budget_s,
            local_ranks=self.request.ranks,
            window_s=self.tuned.window_s,
            trial_timeout_s=self.request.trial_timeout_s,
            budget_ends_s=ends_s,
            study_file=self.tuned.study_file,
        )

    def explore(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Search the declared settings jointly."""
        step = CodeStep(
            bench=self.bench, stored=stored, probe=self.request, sweep=request
        )
        return explore(step).choice

    def workers(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Find the fewest DataLoader workers of your loader."""
        written = sweep_into(self.bench, request, stored.path, stored.profile)
        write_atomically(stored.path, profile_to_toml(written.profile))
        found = written.profile.evidence.workers
        assert found is not None, "a sweep writes its evidence"
        return f"{found.chosen} DataLoader workers: {found.choice}"

    def network(
        self, stored: StoredProfile, request: SweepRequest, nodes: int
    ) -> tuple[str, float]:
        """Measure the step on one rank and on all of them."""
        network, waited_s = measure_own_network(
            stored, request, nodes, bench=self.bench, display=self.bench.display
        )
        return network.choice, waited_s

    def confirm(
        self, stored: StoredProfile, request: SweepRequest, training_s: float
    ) -> str:
        """Measure the tuned settings with your loader, and train for a moment."""
        confirmed = confirm_profile(
            CodeTraining.of(self.bench, stored, request),
            budget_s=request.budget_s,
            training_s=training_s,
        )
        return confirmed_words(confirmed)

    def baseline(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Measure the speedup over the settings before tuning."""
        return "; ".join(gains(compare_recipes(self.bench, stored, request)))
