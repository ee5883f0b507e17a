"""The workers and baseline stages: windows of training in rounds; what was found is written into the profile."""

import contextlib
import sys

from autotune.core.defaults import BASELINE_ROUNDS, JOINT_TRIALS
from autotune.core.evidence import BaselineEvidence, WorkersEvidence
from autotune.core.profile import profile_to_toml
from autotune.search.baseline import BaselineRunner, compare_with
from autotune.search.joint import gap_remains, search_joint
from autotune.search.profiles import StoredProfile, with_evidence, with_workers
from autotune.search.site import local_ranks
from autotune.search.workers import Sweep, SweepRequest, evidence
from autotune.store import write_atomically
from autotune.tuning.bench import Bench
from trainer.dataset import TokenDataset


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
            joint = search_joint(sweep, choice, joint_trials)
    found = evidence(sweep, choice, bench.site).model_copy(update={"joint": joint})
    write_atomically(stored.path, profile_to_toml(with_workers(stored.profile, found, runner)))
    return found


def compare_recipes(
    bench: Bench, stored: StoredProfile, request: SweepRequest, *, rounds: int = BASELINE_ROUNDS
) -> BaselineEvidence:
    """Measure what the tuned settings are worth, and write it into the profile.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If the tuned settings could not be measured.
    """
    probe, train = bench.check_belongs(stored), stored.profile.train
    ranks = local_ranks(bench.site, request.ranks or probe.local_ranks)
    training = bench.training(train, request, ranks)
    with contextlib.closing(TokenDataset.open(request.data)) as dataset:
        recipes, real_shares = compare_with(train, dataset, *training.limits.most())
    trials = len(recipes) + (len(recipes) + 1) * rounds
    with bench.stage("baseline", stored, request, trials) as trial_runner:
        found = BaselineRunner(
            training=training,
            others=recipes,
            real_shares=real_shares,
            most_rounds=rounds,
            memory_budget_bytes=stored.profile.constraints.memory_budget_bytes,
            micro_batches=probe.micro_batches_per_step,
            manifest=bench.manifest,
            device_used_before_bytes=bench.used_before(ranks),
            runner=trial_runner,
        ).run()
    write_atomically(stored.path, profile_to_toml(with_evidence(stored.profile, "baseline", found, trial_runner)))
    return found
