"""The workers and baseline stages: windows of training in rounds; what was found is written into the profile."""

import contextlib
import sys

from autotune.core.defaults import BASELINE_ROUNDS, JOINT_TRIALS
from autotune.core.evidence import BaselineEvidence, ProbeEvidence, WorkersEvidence
from autotune.core.profile import profile_to_toml
from autotune.search.baseline import BaselineRunner, compare_with
from autotune.search.joint import gap_remains, search_joint
from autotune.search.profiles import StoredProfile, with_evidence, with_workers
from autotune.search.site import local_ranks
from autotune.search.workers import Sweep, SweepRequest, evidence
from autotune.store import write_atomically
from autotune.tuning.bench import Bench, check_belongs
from trainer.dataset import Manifest, TokenDataset


def count_workers(
    bench: Bench,
    stored: StoredProfile,
    probe: ProbeEvidence,
    request: SweepRequest,
    manifest: Manifest,
    *,
    joint_trials: int = JOINT_TRIALS,
) -> WorkersEvidence:
    """Find the smallest number of loader workers at the probed micro-batch, and write it into the profile.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If a window could not be measured.
    """
    train = stored.profile.train
    fingerprint = bench.fingerprint(train.model, manifest)
    replayed = request.replayed_step_s is not None
    check_belongs(stored, fingerprint, replayed=replayed)
    together = request.ranks or probe.local_ranks
    together = together if replayed else local_ranks(bench.site, together)
    config = train.model_copy(update={"device": "cpu"}) if replayed else train
    training = bench.training(config, request, manifest, together)
    if warning := training.limits.warning():
        sys.stderr.write(f"warn: {warning}\n")
    with bench.stage("workers", stored, fingerprint, request, 24) as runner:
        sweep = Sweep(training=training, runner=runner)
        choice, joint = sweep.run(), None
        if joint_trials and gap_remains(choice) and not sweep.time_is_over:
            joint = search_joint(sweep, choice, joint_trials)
    found = evidence(sweep, choice, bench.site, joint)
    write_atomically(stored.path, profile_to_toml(with_workers(stored.profile, found, runner)))
    return found


def compare_recipes(
    bench: Bench,
    stored: StoredProfile,
    probe: ProbeEvidence,
    request: SweepRequest,
    manifest: Manifest,
    *,
    most_rounds: int = BASELINE_ROUNDS,
) -> BaselineEvidence:
    """Measure what the tuned settings are worth, and write it into the profile.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If the tuned settings could not be measured.
    """
    train = stored.profile.train
    fingerprint = bench.fingerprint(train.model, manifest)
    check_belongs(stored, fingerprint)
    together = local_ranks(bench.site, request.ranks or probe.local_ranks)
    training = bench.training(train, request, manifest, together)
    with contextlib.closing(TokenDataset.open(request.data)) as dataset:
        others, real_shares = compare_with(train, dataset, *training.limits.most())
    trials = len(others) + (len(others) + 1) * most_rounds
    with bench.stage("baseline", stored, fingerprint, request, trials) as runner:
        found = BaselineRunner(
            training=training,
            others=others,
            real_shares=real_shares,
            most_rounds=most_rounds,
            memory_budget_bytes=stored.profile.constraints.memory_budget_bytes,
            micro_batches=probe.micro_batches_per_step,
            manifest=manifest,
            device_used_before_bytes=bench.used_before(together),
            runner=runner,
        ).run()
    changed = with_evidence(stored.profile, "baseline", found, runner)
    write_atomically(stored.path, profile_to_toml(changed))
    return found
