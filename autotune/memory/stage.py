"""The probe phase of a tuning: the largest size of any subject, as a profile."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from autotune.base.files import check_writable
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Constraints, Evidence, Profile
from autotune.machine.measured_device import DeviceChoice
from autotune.memory.estimate import MemoryEstimate
from autotune.memory.measure import probe_subject
from autotune.memory.probe_request import PreparedProbe, ProbeRequest, check_budgets
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import WrittenProfile, keep_workers, write_profile
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.new_profile import new_profile
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import report_directory
from autotune.trials.values import FinishedTrial

_EXPECTED_TRIALS = 12
"""Usual number of trials of a probe, for its progress bar."""


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
            report_directory(path, probe.request.reports),
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
            headroom_share=probe.request.headroom_share,
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


def probe_subjects(
    device: DeviceChoice,
    requests: Sequence[ProbeRequest],
    out: Path | None,
    *,
    time_limit_s: float | None = None,
) -> list[WrittenProfile]:
    """Probe subjects of the same code, and write each profile before the next probe.

    Args:
        device: Device as you chose it.
        requests: One for each subject: models of one dataset, or your functions with
            each combination of arguments.
        out: File or directory of the profiles; None for the default.
        time_limit_s: Time after which no trial begins, without that for opening the
            machine; None without a limit.

    Raises:
        OutOfTime: If the time is up before a size of every subject ran.
        ExceedsMemory: If not even size 1 of a subject fits.
        Undecided: If trials failed for another reason than memory.
    """
    first = requests[0]
    with open_subject(
        device,
        first.requested_subject(),
        first.data_dir or Path(),
        import_timeout_s=first.trial_timeout_s,
        check=partial(check_budgets, requests),
    ) as bench:
        ends_s = None if time_limit_s is None else time.time() + time_limit_s
        return probe_all(bench, requests, out, ends_s=ends_s)


def probe_all(
    bench: SubjectBench,
    requests: Sequence[ProbeRequest],
    out: Path | None,
    *,
    ends_s: float | None = None,
) -> list[WrittenProfile]:
    """Probe subjects on an open machine, as ``probe_subjects`` does.

    Args:
        bench: Machine that runs the trials, open for the first subject.
        requests: One for each subject.
        out: File or directory of the profiles; None for the default.
        ends_s: Time after which no trial begins, in seconds since 1970.
    """
    paths = profile_paths(out, [request.name for request in requests], bench.site.name)
    written = []
    for request, path in zip(requests, paths, strict=True):
        probe = request.prepare(bench)
        subject_bench = replace(bench, subject=probe.subject)
        written.append(probe_one(subject_bench, probe, path, ends_s=ends_s))
    return written
