"""Subjects of a tuning, and the work of each phase on one machine."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.base.defaults import WINDOW_S
from autotune.base.units import format_bytes
from autotune.baseline.sections import gains
from autotune.baseline.stage import compare_recipes
from autotune.confirm.decide import confirmed_words
from autotune.confirm.stage import confirm_profile
from autotune.confirm.subject_training import training_of
from autotune.errors import BadInput
from autotune.evidence.probe import LOWER_BOUND
from autotune.machine.measured_device import DeviceChoice, MeasuredDevice
from autotune.memory.decide.throughput_dip import dip_words, fastest_point
from autotune.memory.estimate import CannotTrace, MemoryEstimate
from autotune.memory.probe_request import PreparedProbe, ProbeRequest, check_budgets
from autotune.memory.stage import probe_one
from autotune.network.stage import measure_network
from autotune.profiles.decide.batch_split import profile_split
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import StoredProfile, WrittenProfile, read_profile
from autotune.search.stage import explore
from autotune.search.step import SearchedStep
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.mlm.baselines.subject import WORDS as OTHER_TRAINERS
from autotune.subjects.registry import require_kind
from autotune.subjects.subject import Subject
from autotune.trials.decide.least_time import StageName
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.trial_bench import Display
from autotune.workers.stage import sweep_loader


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of the probe phase."""

    summary: str
    """The result in words."""
    trial_s: tuple[float, ...]
    """Seconds of each trial that was measured now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectsToTune:
    """Subjects that are tuned together, before a machine is opened.

    They are models on one dataset, or your functions with each combination of their
    arguments.
    """

    probes: tuple[ProbeRequest, ...]
    """Probe requests, one for each subject, with the same dataset, reports and time
    limit."""
    window_s: float = WINDOW_S
    """Duration of a timed window."""
    study_file: Path | None = None
    """File to which phases write their Optuna studies; None for no file."""

    @property
    def names(self) -> list[str]:
        """Short name of each."""
        return [probe.name for probe in self.probes]

    @property
    def reports(self) -> Path:
        """Directory of the reports, which has the trial logs."""
        return self.probes[0].reports

    @property
    def data(self) -> Path | None:
        """Directory of their dataset; None if they have their own data."""
        return self.probes[0].data_dir

    @contextlib.contextmanager
    def open(
        self, device: DeviceChoice, out: Path | None, display: Display, *, probed: bool
    ) -> Iterator["OpenedSubjects"]:
        """Open a machine, on which all trials run.

        Args:
            device: Device as you chose it.
            out: Directory of the profiles, or a file for one subject.
            display: Shows the progress of phases.
            probed: True if no probe writes the profiles, which must exist.

        Raises:
            AutotuneError: If the device cannot meet the request, or a profile is
                missing.
        """
        first = self.probes[0]
        requested = first.requested_subject()

        def check(site: MeasuredDevice) -> None:
            check_budgets(self.probes, site)
            for path in profile_paths(out, self.names, site.name) if probed else ():
                require_kind(read_profile(path), requested)

        with open_subject(
            device,
            requested,
            self.data or Path(),
            import_timeout_s=first.trial_timeout_s,
            check=check,
        ) as opened:
            bench = replace(opened, display=display)
            paths = profile_paths(out, self.names, bench.site.name)
            subjects = []
            for path, request in zip(paths, self.probes, strict=True):
                probe = request.prepare(bench)
                subjects.append(
                    TunedSubject(
                        bench=replace(bench, subject=probe.subject),
                        path=path,
                        probe_on_machine=probe,
                        request=request,
                        window_s=self.window_s,
                        study_file=self.study_file,
                    )
                )
            yield OpenedSubjects(bench=bench, subjects=tuple(subjects))


@dataclass(slots=True, kw_only=True)
class TunedSubject:
    """A subject on a machine: what each phase does with it.

    Phases after the probe read the profile that it wrote, and write their evidence into
    it. Each returns its result in words.
    """

    bench: SubjectBench
    """Machine on which its trials run."""
    path: Path
    """Path of its profile."""
    request: ProbeRequest
    """The request for its probe."""
    probe_on_machine: PreparedProbe
    """The probe, with the defaults of the machine."""
    window_s: float = WINDOW_S
    """Duration of a timed window."""
    study_file: Path | None = None
    """File of Optuna studies; None for no file."""
    _traced: MemoryEstimate | None = field(default=None)

    @property
    def name(self) -> str:
        """Short name."""
        return self.request.name

    @property
    def subject(self) -> Subject:
        """The subject, with its settings."""
        return self.bench.subject

    def missing(self, phase: StageName, nodes: int) -> str:
        """Return the reason why the subject cannot have a phase; empty if it can.

        Args:
            phase: The phase.
            nodes: Nodes of this job.
        """
        if phase == "network" and self.probe_on_machine.local_ranks * nodes < 2:
            return "requires at least 2 ranks"
        if phase == "estimate" and self.probe_on_machine.size_probe().trace is None:
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
        """Predict the largest size from a trace."""
        probe = self.probe_on_machine.size_probe()
        with self.bench.display.show(f"estimate {self.name}") as update:
            update(0, None, "tracing, to predict its memory")
            try:
                self._traced = probe.estimate(self.bench.machine)
            except (CannotTrace, BadInput) as error:
                return error.message
        size = probe.words(self._traced.max_micro_batch_size)
        return f"{size} predicted to fit {format_bytes(probe.memory_budget_bytes)}"

    def probe(self, ends_s: float) -> ProbeResult:
        """Find the largest size, and write the profile.

        Args:
            ends_s: Time after which no trial begins, in seconds since 1970.
        """
        written = probe_one(
            self.bench, self.probe_on_machine, self.path, self._traced, ends_s=ends_s
        )
        measured = [trial for trial in written.trials if not trial.from_trial_log]
        return ProbeResult(
            summary=_probe_words(written),
            trial_s=tuple(trial.seconds for trial in measured),
        )

    def sweep_request(self, budget_s: float, ends_s: float) -> SweepRequest:
        """Return the request for windows of a phase.

        Args:
            budget_s: Time budget of the phase.
            ends_s: Time after which no window is likely to end, in seconds since 1970.
        """
        return SweepRequest(
            data=self.request.data_dir or Path(),
            reports=self.request.reports,
            budget_s=budget_s,
            local_ranks=self.request.ranks,
            window_s=self.window_s,
            trial_timeout_s=self.request.trial_timeout_s,
            budget_ends_s=ends_s,
            study_file=self.study_file,
        )

    def explore(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Search the settings of the step jointly."""
        step = SearchedStep(
            bench=self.bench, stored=stored, probe=self.request, sweep=request
        )
        return explore(step).choice

    def workers(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Find the fewest DataLoader workers."""
        written = sweep_loader(self.bench, stored, request, stored.path)
        evidence = written.profile.evidence.workers
        assert evidence is not None, "a sweep writes its evidence"
        return f"{evidence.chosen} DataLoader workers: {evidence.choice}"

    def network(
        self, stored: StoredProfile, request: SweepRequest, nodes: int
    ) -> tuple[str, float]:
        """Measure this job's nodes, or the ranks of this one.

        Returns:
            The result in words, and the seconds that its ranks were waited for.
        """
        network, waited_s = measure_network(
            stored, request, nodes, self.bench, self.bench.display
        )
        return network.choice, waited_s

    def confirm(
        self, stored: StoredProfile, request: SweepRequest, training_s: float
    ) -> str:
        """Measure the tuned settings as training will run, and train for a moment."""
        training = training_of(self.bench, stored, request)
        confirmed = confirm_profile(
            training, budget_s=request.budget_s, training_s=training_s
        )
        return confirmed_words(confirmed)

    def baseline(self, stored: StoredProfile, request: SweepRequest) -> str:
        """Compare the tuned settings with untuned ones.

        Other trainers are left to ``autotune baseline``: they would take most of the
        time budget.
        """
        compared = compare_recipes(self.bench, stored, request, left_out=OTHER_TRAINERS)
        return "; ".join(gains(compared))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSubjects:
    """Subjects on an open machine."""

    bench: SubjectBench
    """The machine, whose server runs the trials of all of them."""
    subjects: tuple[TunedSubject, ...]


def _probe_words(written: WrittenProfile) -> str:
    """Return the result of a probe in words."""
    profile, evidence = written.profile, written.probe
    parts = [f"largest: {profile.subject.size_words(evidence.feasible_max)}"]
    if evidence.is_lower_bound:
        parts[0] += f" ({LOWER_BOUND})"
    elif evidence.infeasible_min is not None:
        parts.append(f"out of memory at {evidence.infeasible_min:,}")
    if evidence.curve:
        parts.append(f"fastest {fastest_point(evidence.curve).size:,}")
    split = profile_split(profile, evidence.local_ranks)
    if split is not None:
        parts.append(f"global batch of {split.words(evidence.local_ranks)}")
    if evidence.dip is not None:
        parts.append(dip_words(evidence.dip, profile.subject))
    return "; ".join(parts)
