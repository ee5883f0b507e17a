"""The workers phase: find the number of DataLoader workers and write it into the profile."""

import contextlib
import sys

from autotune.base.files import write_atomically
from autotune.errors import OutOfTime
from autotune.machine.measured_device import local_ranks
from autotune.profiles.store import (
    StoredProfile,
    add_evidence,
    require_local_probe,
    with_data,
)
from autotune.profiles.values import Profile, profile_to_toml
from autotune.trials.runner import TrialRunner
from autotune.trials.session import Session
from autotune.workers import measure
from autotune.workers.joint_search import gap_remains, search_joint
from autotune.workers.measure import Sweep, training_windows
from autotune.workers.values import SweepRequest, WorkersEvidence
from trainer.config.train_config import DataSettings, Tag, tagged


def count_workers(
    bench: Session, stored: StoredProfile, request: SweepRequest
) -> WorkersEvidence:
    """Find the smallest sufficient number of DataLoader workers and write it into the profile.

    Raise ``ProfileRejected`` if it is of another machine, model or dataset,
    ``Undecided`` if a window failed.
    """
    replayed = request.replayed_step_s is not None
    probe = require_local_probe(
        stored, bench.fingerprint(stored.profile.train.model), replayed=replayed
    )
    ranks, config = request.ranks or probe.local_ranks, stored.profile.train
    if replayed:
        config = config.model_copy(update={"device": "cpu"})
    else:
        ranks = local_ranks(bench.site, ranks)
    training = training_windows(bench, config, request, ranks)
    if warning := training.limits.warning():
        sys.stderr.write(f"warning: {warning}\n")
    with bench.stage(
        "workers", stored.path, stored.profile.train.model, request, 24
    ) as runner:
        sweep = Sweep(training=training, runner=runner, budget_s=request.budget_s)
        choice, joint = sweep.run(), None
        if gap_remains(choice) and not sweep.time_is_over:
            with contextlib.suppress(OutOfTime):
                joint = search_joint(sweep, choice)
    found = measure.evidence(sweep, choice, bench.site).model_copy(
        update={"joint": joint}
    )
    write_atomically(
        stored.path, profile_to_toml(add_workers(stored.profile, found, runner))
    )
    return found


def add_workers(
    profile: Profile, found: WorkersEvidence, runner: TrialRunner
) -> Profile:
    """Return the profile with the DataLoader workers that a sweep chose."""
    loader = {"num_workers": found.chosen}
    if found.joint is not None and found.joint.adopted:
        loader |= {
            name: getattr(found.joint, name)
            for name in tagged(DataSettings, Tag.LOADER)
        }
    return add_evidence(
        profile, "workers", found, runner, with_data(profile.train, loader)
    )
