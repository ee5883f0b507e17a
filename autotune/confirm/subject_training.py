"""Training by a subject's own functions, to be confirmed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.base.units import format_seconds
from autotune.confirm.profile_kernels import profile_kernels
from autotune.confirm.training import ConfirmedTraining
from autotune.confirm.values import SubjectTrainingRequest
from autotune.errors import UsageError
from autotune.evidence.argument import Argument
from autotune.evidence.confirm import ConfirmEvidence, SplitRates
from autotune.evidence.kernels import StepKernels
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.memory.size_probe import KERNEL_STEPS, step_fields
from autotune.memory.values import KernelsRequest
from autotune.profiles.decide.follow_up import workers_command
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.parts import part_of
from autotune.subjects.subject import Subject
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Outcome
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.trials.values import Trial
from autotune.workers.values import CallTable
from autotune.workers.windows import (
    SubjectWindows,
    queued_batches,
    units_per_micro_batch,
    window_trial,
    windows_of_subject,
)

MIN_STEPS = 2
"""Fewest optimizer steps of a window."""
_LOADER_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectTraining:
    """Training with the settings of a profile, by the functions of its subject.

    Its step decides the global batch, so only the chosen size is measured.
    """

    bench: SubjectBench
    """Machine on which trials of the subject run."""
    stored: StoredProfile
    probe: ProbeEvidence
    """Evidence of the profile's probe."""
    windows: SubjectWindows[Subject]
    """Windows with the settings of the profile, and with its loader."""

    @property
    def sizes(self) -> Sequence[int]:
        """The size of the profile; 1 if it has none, as every window has that."""
        size = self.stored.profile.size
        return [size if isinstance(size, int) else 1]

    @property
    def size_name(self) -> str:
        """Name of the size, for labels."""
        return self.windows.subject.size.name

    @property
    def num_workers(self) -> int:
        """DataLoader workers of each rank."""
        return int(self.windows.choice["num_workers"])

    @property
    def not_verified(self) -> str | None:
        """Loader settings that a training function of yours does not take."""
        parameters = self.bench.step_parameters
        step = self.windows.step
        is_own = step is not None and step.function == self.bench.subject.code().get(
            "step"
        )
        if self.windows.fed_by != "training" or not is_own or parameters is None:
            return None
        tuned: Mapping[str, Argument] = self.stored.profile.settings
        ignored = [
            f"{name} {tuned[name]}"
            for name in _LOADER_SETTINGS
            if name in tuned and name not in parameters
        ]
        if not ignored:
            return None
        return (
            f"{', '.join(ignored)}: the training function has its own loader, and does"
            " not take it"
        )

    def window(self, size: int, number: int, names: Sequence[str]) -> Trial:
        """Return the trial of a window, as for ``ConfirmedTraining``."""
        return window_trial(self.windows, number, names, min_steps=MIN_STEPS)

    def accumulation_steps(self, size: int) -> int | None:
        """Return None: windows have the step of training."""
        return None

    def rate(self, size: int, figures: WindowFigures) -> float:
        """Return the units/s of a window."""
        return figures.units_per_s

    def kernels(self, runner: TrialRunner, split: SplitRates) -> StepKernels | str:
        """Return the kernels of a step, or the reason why they were not profiled.

        The step is that of the probe, with its own batches.
        """
        windows, size = self.windows, self.sizes[0]
        if self.probe.trains:
            return "the step is a training loop, which cannot be taken apart"
        if not isinstance(self.stored.profile.size, int):
            return f"the profile has no {self.size_name}"
        request = KernelsRequest(
            **step_fields(
                windows.subject,
                {**windows.choice, self.size_name: size},
                KERNEL_STEPS[windows.device],
                device=windows.device,
                local_ranks=windows.local_ranks,
                source_sha256=self.bench.source_sha256("step"),
            ),
            memory_budget_bytes=None,
        )
        timeout_s = windows.request.trial_timeout_s
        return profile_kernels(
            runner,
            request,
            windows.subject.words,
            timeout_s=timeout_s,
            **self.bench.local_inputs(timeout_s),
        )

    def confirmed(
        self, profile: Profile, evidence: ConfirmEvidence, runner: TrialRunner
    ) -> Profile:
        """Return a profile with the evidence."""
        return add_evidence(profile, "confirm", evidence, runner)

    def train(
        self, profile: Profile, runner: TrialRunner, seconds: float
    ) -> tuple[Outcome, str]:
        """Train by your own functions, as for ``ConfirmedTraining``."""
        windows = self.windows
        assert windows.step is not None, "a probed profile has a step"
        loader = None
        if windows.fed_by == "loader":
            loader = CallTable.of_call(windows.loader)
        request = SubjectTrainingRequest(
            step=CallTable.of_call(windows.step),
            loader=loader,
            unit=windows.subject.size.unit,
            units_per_micro_batch=units_per_micro_batch(windows),
            queued_batches=queued_batches(windows),
            device=windows.device,
            seconds=seconds,
            local_ranks=self.windows.local_ranks,
            source_sha256=windows.source_sha256,
        )
        timeout_s = seconds + windows.request.trial_timeout_s
        outcome = runner.run(
            request.trial(timeout_s=timeout_s, **self.bench.local_inputs(timeout_s)),
            f"training by your own code, {format_seconds(seconds)}",
        )
        return outcome, (
            f"{format_seconds(seconds)} are too short for a start and a few steps"
        )


def training_of(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> ConfirmedTraining:
    """Return the training of a profile of any subject, in windows of a request.

    Raises:
        ProfileRejected: If the profile is of another machine, subject or dataset.
        UsageError: If nothing feeds the step.
    """
    return part_of(bench.subject.kind, "training", _training_of)(bench, stored, request)


def _training_of(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> ConfirmedTraining:
    """Return the training by the subject's own functions."""
    probe = require_local_probe(stored, bench.fingerprint)
    subject, profile = bench.subject, stored.profile
    if not probe.trains and subject.loader({}) is None:
        raise UsageError(
            f"{subject.words} has no loader, with which training could be confirmed",
            next_step=f"Add one: {workers_command(profile, stored.path)}",
        )
    fixed = profile.subject.arguments.get("num_workers", 0)
    request = replace(request, local_ranks=request.local_ranks or probe.local_ranks)
    windows = windows_of_subject(
        subject,
        {"num_workers": fixed, **profile.settings},
        request,
        bench,
        fed_by="training" if probe.trains else "loader",
    )
    return SubjectTraining(bench=bench, stored=stored, probe=probe, windows=windows)
