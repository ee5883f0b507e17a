"""Sweep of DataLoader workers, and the joint search if no number suffices."""

import sys
from pathlib import Path
from typing import Any

from autotune.base.files import write_atomically
from autotune.errors import BadInput, OutOfTime
from autotune.evidence.profile import Constraints, Evidence, Profile, SubjectTable
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import MeasuredDevice
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import (
    StoredProfile,
    WrittenProfile,
    with_functions,
    with_loader_settings,
    write_profile,
)
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench
from autotune.subjects.new_profile import new_profile, subject_table
from autotune.subjects.parts import part_of
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.joint_search import search_joint
from autotune.workers.measure import WorkerSweep
from autotune.workers.probed_windows import windows_of_profile
from autotune.workers.windows import SubjectWindows
from autotune.workers.workers_evidence import workers_evidence

EXPECTED_TRIALS = 24
"""Usual number of windows of a sweep, for the progress display."""


def sweep_on(
    bench: SubjectBench, windows: SubjectWindows[Any], path: Path
) -> tuple[WorkersEvidence, TrialRunner]:
    """Find the fewest workers on an open bench.

    The trials are in the trial log of the profile at ``path``. Errors are those of
    ``sweep_workers``.
    """
    loader = bench.subject.code().get("loader", bench.subject.words)
    with bench.tuning(
        f"workers {loader}",
        path,
        bench.fingerprint,
        windows.request,
        EXPECTED_TRIALS,
    ) as runner:
        evidence = sweep_workers(windows, runner, bench.site, f"{path.stem}: workers")
    return evidence, runner


def sweep_loader(
    bench: SubjectBench,
    stored: StoredProfile | None,
    request: SweepRequest,
    path: Path,
    *,
    keeps_previous: bool = False,
) -> WrittenProfile:
    """Find the fewest workers of a subject's loader, and write them into a profile.

    Args:
        bench: Machine on which trials of the subject run.
        stored: Profile to add to; None writes a new one.
        request: Windows to measure, with their time budget.
        path: Path of the profile.
        keeps_previous: True to keep the profile of before as ``.previous.toml``.

    Raises:
        ProfileRejected: If the profile is of another machine, subject or dataset.
        BadInput: If it is not known with which size to measure.
        OutOfTime: If the deadline leaves no time for the first three rounds.
        Undecided: If a window failed.
    """
    windows_of = part_of(bench.subject.kind, "windows", windows_of_profile)
    windows = windows_of(bench, stored, request, path)
    evidence, runner = sweep_on(bench, windows, path)
    trials = tuple(runner.finished)
    if stored is None:
        profile = new_profile(
            bench,
            runner,
            command="workers",
            settings={**evidence.loader_settings},
            constraints=Constraints(),
            evidence=Evidence(workers=evidence),
        )
        previous = write_profile(path, profile)
        return WrittenProfile(
            path=path, profile=profile, trials=trials, previous=previous
        )
    changed = with_loader_settings(stored.profile, evidence.loader_settings)
    profile = add_evidence(stored.profile, "workers", evidence, runner, changed)
    profile = _with_loader(profile, subject_table(bench))
    if not keeps_previous:
        write_atomically(path, profile_to_toml(profile))
        return WrittenProfile(path=path, profile=profile, trials=trials)
    previous = write_profile(path, profile)
    return WrittenProfile(path=path, profile=profile, trials=trials, previous=previous)


def _with_loader(profile: Profile, swept: SubjectTable) -> Profile:
    """Return the profile with the function of the swept loader.

    The fixed arguments stay those of the probe.
    """
    loader = swept.model_copy(
        update={
            "table": {
                name: value
                for name, value in swept.table.items()
                if name == "loader_function"
            },
            "sources": {
                role: sha256
                for role, sha256 in swept.sources.items()
                if role == "loader"
            },
        }
    )
    return profile.model_copy(
        update={"subject": with_functions(profile.subject, loader)}
    )


def sweep_workers(
    windows: SubjectWindows[Any],
    runner: TrialRunner,
    site: MeasuredDevice,
    study_name: str,
) -> WorkersEvidence:
    """Find the smallest sufficient number of workers of a subject's loader.

    If none is sufficient, the settings that its loader takes are searched with it.

    Args:
        windows: Windows of the subject, with their time budget.
        runner: Runner of the windows, with their trial log.
        site: The measured machine.
        study_name: Name of the Optuna study of the sweep.

    Raises:
        OutOfTime: If the deadline leaves no time for the first three rounds.
        BadInput: If your code failed in a window of the sweep.
        Undecided: If a window failed.
    """
    warning = windows.limits.warning()
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")
    sweep = WorkerSweep(windows=windows, runner=runner, study_name=study_name)
    choice = sweep.run()
    joint = None
    if choice.gap_remains and not sweep.time_is_over:
        try:
            joint = search_joint(sweep, choice)
        except OutOfTime:
            # The runner raises this before a window that would likely end after the
            # deadline. The choice of the sweep then stands.
            pass
        except BadInput as error:
            # The loader ran with as many workers, and failed with another setting.
            varied = " and ".join(sorted(windows.searched))
            sys.stderr.write(
                f"warning: the search of {varied} ended early: {error.message}\n"
            )
    evidence = workers_evidence(sweep, choice, site)
    if joint is None:
        return evidence
    finding = evidence.utilisation_finding
    if joint.adopted:
        # It is of other loader settings than those that were adopted.
        finding = None
    return evidence.model_copy(update={"joint": joint, "utilisation_finding": finding})
