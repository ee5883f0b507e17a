"""The workers phase: find the number of DataLoader workers for a profile."""

import sys
from typing import Any

from autotune.base.files import write_atomically
from autotune.errors import BadInput, OutOfTime
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import MeasuredDevice, local_ranks
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile, before_sweep, with_data
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.runner import TrialRunner
from autotune.trials.session import Session
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.joint_search import (
    gap_remains,
    search_joint,
    varied_settings,
)
from autotune.workers.measure import WorkerSweep
from autotune.workers.windows import SubjectWindows, training_windows
from autotune.workers.workers_evidence import workers_evidence

EXPECTED_TRIALS = 24
"""Usual number of windows of a sweep, for the progress display."""


def count_workers(
    bench: Session, stored: StoredProfile, request: SweepRequest
) -> WorkersEvidence:
    """Find the smallest sufficient number of workers, and write it into the profile.

    Args:
        bench: Session on the machine and the dataset.
        stored: Profile that was probed here.
        request: Windows to measure, with their time budget.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
        OutOfTime: If the deadline leaves no time for the first three rounds.
        Undecided: If a window failed.
    """
    windows = _windows_of(bench, stored, request)
    model = windows.subject.config.model
    with bench.phase("workers", stored.path, model, request, EXPECTED_TRIALS) as runner:
        evidence = sweep_workers(windows, runner, bench.site)
    profile = add_workers(stored.profile, evidence, runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return evidence


def sweep_workers(
    windows: SubjectWindows[Any], runner: TrialRunner, site: MeasuredDevice
) -> WorkersEvidence:
    """Find the smallest sufficient number of workers of a subject's loader.

    If none is sufficient, the settings that its loader takes are searched with it.

    Args:
        windows: Windows of the subject, with their time budget.
        runner: Runner of the windows, with their trial log.
        site: The measured machine.

    Raises:
        OutOfTime: If the deadline leaves no time for the first three rounds.
        BadInput: If your code failed in a window of the sweep.
        Undecided: If a window failed.
    """
    warning = windows.limits.warning()
    if warning is not None:
        sys.stderr.write(f"warning: {warning}\n")
    sweep = WorkerSweep(windows=windows, runner=runner)
    choice = sweep.run()
    joint = None
    if gap_remains(choice) and not sweep.time_is_over:
        try:
            joint = search_joint(sweep, choice)
        except OutOfTime:
            # The runner raises this before a window that would likely end after the
            # deadline. The choice of the sweep then stands.
            pass
        except BadInput as error:
            # The loader ran with as many workers, and failed with another setting.
            varied = " and ".join(sorted(varied_settings(windows)))
            sys.stderr.write(
                f"warning: the search of {varied} ended early: {error.message}\n"
            )
    evidence = workers_evidence(sweep, choice, site)
    return evidence.model_copy(update={"joint": joint})


def _windows_of(
    bench: Session, stored: StoredProfile, request: SweepRequest
) -> SubjectWindows[MlmSubject]:
    """Return the windows of a probed profile, on as many ranks as requested or probed.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
    """
    is_replayed = request.replayed_step_s is not None
    config = before_sweep(stored.profile)
    probe = require_local_probe(
        stored, bench.fingerprint(config.model), replayed=is_replayed
    )
    ranks = request.local_ranks or probe.local_ranks
    if is_replayed:
        # A replay computes nothing, so its ranks need no GPUs.
        config = config.model_copy(update={"device": "cpu"})
    else:
        ranks = local_ranks(bench.site, ranks)
    return training_windows(bench, config, request, ranks)


def add_workers(
    profile: Profile, evidence: WorkersEvidence, runner: TrialRunner
) -> Profile:
    """Return the profile with the loader settings that a sweep chose."""
    train = with_data(before_sweep(profile), evidence.loader_settings)
    return add_evidence(profile, "workers", evidence, runner, train)
