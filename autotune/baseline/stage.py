"""The baseline phase of a tuning.

It compares the tuned settings with both baselines and writes the result into the
profile.
"""

import contextlib

from autotune.base.defaults import BASELINE_ROUNDS
from autotune.base.files import write_atomically
from autotune.baseline.dataset_recipes import non_padding_share, recipes_to_compare
from autotune.baseline.measure import BaselineRunner
from autotune.evidence.baseline import BaselineEvidence
from autotune.machine.measured_device import local_ranks
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.mlm.workers.windows import training_windows
from autotune.trials.rounds import Rounds
from autotune.trials.session import Session
from autotune.trials.sweep_request import SweepRequest
from trainer.data.dataset import TokenDataset


def compare_recipes(
    bench: Session,
    stored: StoredProfile,
    request: SweepRequest,
    *,
    rounds: int = BASELINE_ROUNDS,
) -> BaselineEvidence:
    """Measure the speedup over both baselines, and write it into the profile.

    Args:
        bench: Session on the machine and the dataset.
        stored: Profile that was probed here.
        request: Windows to measure, with their time budget.
        rounds: Maximum number of rounds.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
        OutOfTime: If the deadline leaves no time for three rounds.
        Undecided: If a window of the tuned settings failed.
    """
    train = stored.profile.train
    probe = require_local_probe(stored, bench.fingerprint(train.model))
    ranks = local_ranks(bench.site, request.local_ranks or probe.local_ranks)
    training = training_windows(bench, train, request, ranks)
    max_workers, limit = training.limits.max_workers()
    with contextlib.closing(TokenDataset.open(request.data)) as dataset:
        recipes = recipes_to_compare(train, dataset, max_workers, limit)
        shares = {
            name: non_padding_share(recipe.config, dataset)
            for name, recipe in recipes.items()
        }
    fit_checks = len(recipes) - 1  # one for each baseline
    expected_trials = fit_checks + len(recipes) * rounds
    with bench.phase(
        "baseline", stored.path, train.model, request, expected_trials
    ) as trial_runner:
        comparison = BaselineRunner(
            training=training,
            recipes=recipes,
            non_padding_shares=shares,
            max_rounds=rounds,
            memory_budget_bytes=stored.profile.memory_budget_bytes,
            gradient_accumulation_steps=probe.gradient_accumulation_steps,
            manifest=bench.manifest,
            device_used_before_bytes=bench.used_before_bytes(ranks),
            windows=Rounds(runner=trial_runner),
        ).run()
    profile = add_evidence(stored.profile, "baseline", comparison, trial_runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return comparison
