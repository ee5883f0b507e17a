"""The explore, workers and baseline stages: windows of training in rounds, and the profile with what was found."""

import contextlib
import sys

from autotune.base.defaults import JOINT_TRIALS
from autotune.base.files import write_atomically
from autotune.errors import OutOfTime
from autotune.machine.measured_device import local_ranks
from autotune.profiles.store import StoredProfile, with_workers
from autotune.profiles.values import profile_to_toml
from autotune.trials.session import Bench
from autotune.workers import measure as workers
from autotune.workers.joint_search import gap_remains, search_joint
from autotune.workers.measure import Sweep
from autotune.workers.values import SweepRequest, WorkersEvidence


def count_workers(
    bench: Bench, stored: StoredProfile, request: SweepRequest, *, joint_trials: int = JOINT_TRIALS
) -> WorkersEvidence:
    """Find the smallest number of loader workers at the probed micro-batch, and write it into the profile.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If a window could not be measured.
    """
    replayed = request.replayed_step_s is not None
    probe = bench.check_belongs(stored, replayed=replayed)
    ranks, config = request.ranks or probe.local_ranks, stored.profile.train
    if replayed:
        config = config.model_copy(update={"device": "cpu"})
    else:
        ranks = local_ranks(bench.site, ranks)
    training = bench.training(config, request, ranks)
    if warning := training.limits.warning():
        sys.stderr.write(f"warn: {warning}\n")
    with bench.stage("workers", stored, request, 24) as runner:
        sweep = Sweep(training=training, runner=runner)
        choice, joint = sweep.run(), None
        if joint_trials and gap_remains(choice) and not sweep.time_is_over:
            with contextlib.suppress(OutOfTime):
                joint = search_joint(sweep, choice, joint_trials)
    found = workers.evidence(sweep, choice, bench.site).model_copy(update={"joint": joint})
    write_atomically(stored.path, profile_to_toml(with_workers(stored.profile, found, runner)))
    return found
