"""The baseline phase of a tuning.

It compares the tuned settings with both baselines and writes the result into the
profile.
"""

import contextlib

from autotune.base.defaults import BASELINE_ROUNDS
from autotune.base.files import write_atomically
from autotune.baseline.measure import BaselineRunner, compare_with
from autotune.baseline.values import BaselineEvidence
from autotune.machine.measured_device import local_ranks
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.runner import Rounds
from autotune.trials.session import Session
from autotune.workers.measure import training_windows
from autotune.workers.values import SweepRequest
from trainer.data.dataset import TokenDataset


def compare_recipes(
    bench: Session,
    stored: StoredProfile,
    request: SweepRequest,
    *,
    rounds: int = BASELINE_ROUNDS,
) -> BaselineEvidence:
    """Measure the speedup over both baselines, and write it into the profile.

    Raises:
        ProfileRejected: If it is of another machine, model or dataset.
        Undecided: If the tuned settings failed.
    """
    probe, train = (
        require_local_probe(stored, bench.fingerprint(stored.profile.train.model)),
        stored.profile.train,
    )
    ranks = local_ranks(bench.site, request.ranks or probe.local_ranks)
    training = training_windows(bench, train, request, ranks)
    with contextlib.closing(TokenDataset.open(request.data)) as dataset:
        recipes, shares = compare_with(train, dataset, *training.limits.max_workers())
    trials = len(recipes) - 1 + len(recipes) * rounds
    with bench.phase(
        "baseline", stored.path, stored.profile.train.model, request, trials
    ) as trial_runner:
        found = BaselineRunner(
            training=training,
            recipes=recipes,
            non_padding_shares=shares,
            most_rounds=rounds,
            memory_budget_bytes=stored.profile.constraints.memory_budget_bytes,
            micro_batches=probe.gradient_accumulation_steps,
            manifest=bench.manifest,
            device_used_before_bytes=bench.used_before_bytes(ranks),
            reading=Rounds(runner=trial_runner),
        ).run()
    write_atomically(
        stored.path,
        profile_to_toml(add_evidence(stored.profile, "baseline", found, trial_runner)),
    )
    return found
