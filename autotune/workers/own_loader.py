"""Sweep of a loader of yours, from request to written profile."""

from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UsageError
from autotune.machine.measured_device import DeviceChoice
from autotune.profiles.local_probe import require_local
from autotune.profiles.profile_paths import profile_paths
from autotune.profiles.store import (
    StoredProfile,
    WrittenProfile,
    known_profile,
    read_profile,
)
from autotune.subjects.bench import SubjectBench, open_subject
from autotune.subjects.registry import merged_subject
from autotune.subjects.subject import Subject
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.stage import sweep_loader


def loader_to_sweep(
    subjects: Sequence[Subject], profile: Path, request: SweepRequest
) -> Subject:
    """Return the subject whose loader is swept.

    A profile of your own code gives its step and its arguments.

    Raises:
        UsageError: If there is no loader, nothing that consumes its batches, or more
            than one combination of arguments.
        AutotuneError: If the profile cannot be read.
    """
    subject, *others = subjects
    if others:
        raise UsageError(
            "a sweep takes one value of each argument",
            next_step="Run it once for each value of --set.",
        )
    if profile.is_file():
        subject = merged_subject(read_profile(profile).profile.subject, subject)
    if subject.loader({}) is None:
        raise UsageError(
            "--step needs a loader to feed it",
            next_step="Add --loader my_module:build_loader",
        )
    if request.replayed_step_s is None and subject.step({}) is None:
        raise UsageError(
            "nothing consumes the batches of --loader",
            next_step=(
                "Add --step my_module:build_step; or --step-time 120ms, the duration of"
                " a step"
            ),
        )
    return subject


def sweep_own(
    device: DeviceChoice, subject: Subject, request: SweepRequest, out: Path | None
) -> WrittenProfile:
    """Find the fewest workers of a loader of yours, and write them into a profile.

    Raises:
        ProfileRejected: If ``out`` exists and is of other code, or of another machine.
        BadInput: If it is not known with which size to measure.
    """
    replayed = request.replayed_step_s is not None
    with open_subject(
        "cpu" if replayed else device,
        subject,
        import_timeout_s=request.trial_timeout_s,
    ) as bench:
        (path,) = profile_paths(out, [subject.name], bench.site.name)
        stored = _earlier_profile(path, bench, given=out is not None, replayed=replayed)
        return sweep_loader(bench, stored, request, path, keeps_previous=True)


def _earlier_profile(
    path: Path, bench: SubjectBench, *, given: bool, replayed: bool
) -> StoredProfile | None:
    """Return the profile that a sweep adds to; None to write a new one.

    Args:
        path: Path of the profile.
        bench: This machine, with your code.
        given: True if you named the profile, which then must match.
        replayed: True if a step is replayed, so that its GPU need not be here.

    Raises:
        ProfileRejected: If a given profile is of other code, or of another machine.
    """
    if not given:
        return known_profile(path, bench.fingerprint)
    if not path.exists():
        return None
    stored = read_profile(path)
    require_local(stored, bench.fingerprint, replayed=replayed)
    return stored
