"""The probe phase of a tuning: the largest size of any subject, as a profile."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from autotune.base.files import check_writable
from autotune.base.log import LOG
from autotune.base.units import format_bytes
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Constraints, Evidence, Profile
from autotune.machine.gpu_models import RESERVE_BYTES
from autotune.machine.measured_device import MeasuredDevice
from autotune.memory.decide.overheads import (
    OverheadsRange,
    overheads_on_cpu,
    overheads_on_gpu,
)
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.measure import probe_subject
from autotune.memory.probe_limits import ProbeLimits
from autotune.memory.size_probe import SizeProbe
from autotune.profiles.store import WrittenProfile, keep_workers, write_profile
from autotune.subjects.bench import SubjectBench
from autotune.subjects.new_profile import new_profile
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import report_directory
from autotune.trials.values import FinishedTrial

_EXPECTED_TRIALS = 12
"""Usual number of trials of a probe, for its progress bar."""


class PreparedProbe(Protocol):
    """A subject's contribution to its probe on a known machine."""

    @property
    def limits(self) -> ProbeLimits:
        """The limits as they were requested."""

    @property
    def memory_budget_bytes(self) -> int:
        """Memory that each rank may use."""

    def size_probe(self) -> SizeProbe:
        """Return the search for the largest size, with the trace of a step."""

    def settings_at(self, size: int, path: Path) -> Mapping[str, Any]:
        """Return the tables of a profile that have the settings at a size.

        They are ``train`` for the bundled trainer, else ``settings``.

        Args:
            size: The chosen size.
            path: Path of the profile.
        """

    @property
    def global_batch_tokens(self) -> int | None:
        """Non-padding tokens of an optimizer step on all ranks.

        None if the step decides it.
        """


def tell_budget(site: MeasuredDevice, probe: PreparedProbe, name: str) -> None:
    """Report the memory budget of a probe, and what a default budget leaves free."""
    left = ""
    if site.gpu is not None and probe.limits.memory_bytes is None:
        left = (
            f" ({format_bytes(RESERVE_BYTES)} of the GPU stay free; change the budget"
            " with --memory)"
        )
    LOG.info(
        "%s: memory budget %s per rank%s",
        name,
        format_bytes(probe.memory_budget_bytes),
        left,
    )


def overheads_range(site: MeasuredDevice, ranks: int) -> OverheadsRange:
    """Return the memory that a traced step needs in addition on a device."""
    if site.gpu is None:
        return overheads_on_cpu()
    return overheads_on_gpu(site.gpu.compute_capability, ranks, site.cuda_bytes)


def run_probe(
    bench: SubjectBench,
    probe: PreparedProbe,
    path: Path,
    traced: MemoryEstimate | None = None,
    *,
    ends_s: float | None = None,
    study: str = "probe",
) -> tuple[int, ProbeEvidence, TrialRunner]:
    """Find the largest size, with the trial log of the profile at ``path``.

    Args:
        bench: Machine that runs the trials, of the probe's subject.
        probe: The subject and its limits.
        path: Path at which the profile will be written; it names the trial log.
        traced: Prediction of its memory, if it was traced before.
        ends_s: Time after which no trial begins, in seconds since 1970; None without a
            limit.
        study: Name of the Optuna study within the profile.

    Returns:
        The chosen size, the evidence, and the runner of the trials.

    Raises:
        OutOfTime: If the time is up before any size ran.
        ExceedsMemory: If not even size 1 fits.
        Undecided: If trials failed for another reason than memory.
    """
    with bench.display.show(f"probe {bench.subject.words}") as update:
        runner = bench.runner(
            report_directory(path, probe.limits.reports),
            bench.fingerprint,
            update,
            _EXPECTED_TRIALS,
        )
        runner.budget_ends_s = ends_s
        size, evidence = probe_subject(
            replace(probe.size_probe(), study_name=f"{path.stem}: {study}"),
            runner,
            bench.site.host.ram_available_bytes,
            traced,
        )
    return size, evidence, runner


def profile_of_probe(
    bench: SubjectBench,
    probe: PreparedProbe,
    path: Path,
    traced: MemoryEstimate | None = None,
    *,
    ends_s: float | None = None,
    study: str = "probe",
) -> tuple[Profile, tuple[FinishedTrial, ...]]:
    """Return the profile of a probe, not written yet, and every trial.

    Arguments and errors are those of ``run_probe``.
    """
    size, evidence, runner = run_probe(
        bench, probe, path, traced, ends_s=ends_s, study=study
    )
    profile = new_profile(
        bench,
        runner,
        command="probe",
        constraints=Constraints(
            memory_budget_bytes=probe.memory_budget_bytes,
            headroom_share=probe.limits.headroom_share,
            global_batch_tokens=probe.global_batch_tokens,
        ),
        evidence=Evidence(probe=evidence),
        **probe.settings_at(size, path),
    )
    return profile, tuple(runner.finished)


def probe_one(
    bench: SubjectBench,
    probe: PreparedProbe,
    path: Path,
    traced: MemoryEstimate | None = None,
    *,
    ends_s: float | None = None,
) -> WrittenProfile:
    """Find the largest size, and write the profile.

    Arguments and errors are those of ``run_probe``.

    Raises:
        BadInput: If the profile cannot be written.
    """
    check_writable(path.parent)
    profile, trials = profile_of_probe(bench, probe, path, traced, ends_s=ends_s)
    profile = keep_workers(profile, path)
    previous = write_profile(path, profile)
    return WrittenProfile(path=path, profile=profile, trials=trials, previous=previous)
