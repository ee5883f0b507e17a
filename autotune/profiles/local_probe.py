"""Check that a profile was probed on this machine, before others measure with it.

The worker sweep, network tuning, exploration and baseline rest on the probe: all train
with the micro-batch size that it verified to fit.
"""

import sys

from autotune.errors import ProfileRejected
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Fingerprint
from autotune.profiles.checks import mismatch_docs
from autotune.profiles.decide.fingerprint_check import compare_fingerprints
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.store import StoredProfile


def require_local_probe(
    stored: StoredProfile, here: Fingerprint | None = None, *, replayed: bool = False
) -> ProbeEvidence:
    """Return a profile's probe evidence, which must be of this machine.

    Minor differences are written to standard error.

    Args:
        stored: Profile to check.
        here: Fingerprint of this machine; None compares nothing.
        replayed: True if a GPU's step is replayed: the GPU is not compared, and CPU and
            file system must match.

    Raises:
        ProfileRejected: If the profile has no probe, its micro-batch size exceeds the
            largest that the probe verified, or its machine, model or dataset does not
            match.
    """
    path = stored.path
    probe = stored.profile.evidence.probe
    command = probe_command(stored.profile, path)
    if probe is None:
        raise ProfileRejected(
            f"{path} has no probe result, which this command requires",
            next_step=f"Probe first: {command}",
        )
    if here is not None:
        require_local(stored, here, replayed=replayed)
    size, name = stored.profile.size, stored.profile.subject.size
    if isinstance(size, int) and size > probe.feasible_max:
        raise ProfileRejected(
            f"{name} = {size} exceeds {probe.feasible_max}, the"
            " largest that was verified to fit",
            next_step=f"Lower it in {path}, or probe again: {command}",
        )
    return probe


def require_local(
    stored: StoredProfile, here: Fingerprint, *, replayed: bool = False
) -> None:
    """Check that a profile is of this machine, with the same subject and dataset.

    Differences that leave it valid are written to standard error.

    Args:
        stored: Profile to check.
        here: Fingerprint of this machine.
        replayed: As for ``require_local_probe``.

    Raises:
        ProfileRejected: If the machine, model, source or dataset does not match.
    """
    errors = _report_differences(stored, here, replayed=replayed)
    if not errors:
        return
    differences = "; ".join(errors.values())
    if stored.profile.subject.sources and "model_sha256" in errors:
        differences = (
            "your code, its arguments or its source have changed since it was written"
        )
    raise ProfileRejected(
        f"{stored.path} does not match: {differences}",
        next_step=f"Probe here first: {probe_command(stored.profile, stored.path)}",
        docs=mismatch_docs(errors),
    )


def _report_differences(
    stored: StoredProfile, here: Fingerprint, *, replayed: bool
) -> dict[str, str]:
    """Write the differences that leave the probe valid to standard error.

    Returns:
        Differences that invalidate the probe, in words, by field of the fingerprint.
    """
    errors = {}
    made_on = stored.profile.fingerprint
    for check in compare_fingerprints(made_on, here, replayed=replayed):
        difference = (
            f"{check.field} is {check.here} here, {check.profile} in the profile"
        )
        if check.found == "error":
            errors[check.field] = difference
        else:
            sys.stderr.write(f"{check.found}: {difference}\n")
    if not stored.intact:
        sys.stderr.write(f"info: {stored.path} was modified since it was written\n")
    return errors
