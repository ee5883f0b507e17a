"""Check that a profile was probed on this machine, before others measure with it.

The worker sweep, network tuning, exploration and baseline rest on the probe: all train
with the micro-batch size that it verified to fit.
"""

import sys

from autotune.errors import ProfileRejected
from autotune.memory.values import ProbeEvidence
from autotune.profiles.checks import mismatch_docs
from autotune.profiles.decide.fingerprint_check import compare_fingerprints
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.store import StoredProfile
from autotune.profiles.values import Fingerprint


def require_local_probe(
    stored: StoredProfile, here: Fingerprint | None = None, *, replayed: bool = False
) -> ProbeEvidence:
    """Return a profile's probe evidence, which must be of this machine.

    Minor differences are written to standard error.

    Args:
        stored: Profile to check.
        here: Fingerprint of this machine; None compares nothing.
        replayed: True if a GPU's step is replayed, so that the GPU is not compared.

    Raises:
        ProfileRejected: If the profile has no probe, its micro-batch size exceeds the
            largest that the probe verified, or its machine, model or dataset does not
            match.
    """
    errors: dict[str, str] = {}
    if here is not None:
        errors = _report_differences(stored, here, replayed=replayed)
    path = stored.path
    probe = stored.profile.evidence.probe
    micro_batch_size = stored.profile.train.micro_batch_size
    if probe is None:
        reason = f"{path} has no probe result, which this command requires"
        step = "Probe first"
    elif errors:
        reason = f"{path} does not match: {'; '.join(errors.values())}"
        step = "Probe here first"
    elif micro_batch_size > probe.feasible_max:
        reason = (
            f"micro_batch_size = {micro_batch_size} exceeds {probe.feasible_max}, the"
            " largest that was verified to fit"
        )
        step = f"Lower it in {path}, or probe again"
    else:
        return probe
    raise ProfileRejected(
        reason,
        next_step=f"{step}: {probe_command(stored.profile, path)}",
        docs=mismatch_docs(errors),
    )


def _report_differences(
    stored: StoredProfile, here: Fingerprint, *, replayed: bool
) -> dict[str, str]:
    """Write minor differences of a profile to standard error.

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
