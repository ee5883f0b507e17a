"""The baseline stage: what the tuned settings are worth, written into the profile."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from autotune.core.defaults import TRIAL_TIMEOUT_S, WINDOW_S
from autotune.core.evidence import BaselineEvidence, ProbeEvidence
from autotune.core.profile import profile_to_toml
from autotune.search.baseline import BaselineRequest, Comparison, compare_with
from autotune.search.profiles import StoredProfile, report_directory, with_baseline
from autotune.search.site import local_ranks
from autotune.search.workers import SweepRequest
from autotune.store import write_atomically
from autotune.tuning.bench import Bench, check_belongs
from trainer.dataset import Manifest, TokenDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineAsked:
    """How settings are to be held against others."""

    data: Path
    reports: Path
    minutes: float
    ranks: int | None = None
    """None: as the profile was probed."""
    rounds: int = 10
    window_s: float = WINDOW_S
    trial_timeout_s: float = TRIAL_TIMEOUT_S


def compare_recipes(
    bench: Bench, stored: StoredProfile, probe: ProbeEvidence, asked: BaselineAsked, manifest: Manifest
) -> BaselineEvidence:
    """Measure, and write what was found into the profile.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If the tuned settings could not be measured.
    """
    train = stored.profile.train
    fingerprint = bench.fingerprint(train.model, manifest)
    check_belongs(stored, fingerprint)
    together = local_ranks(bench.site, asked.ranks or probe.local_ranks)
    windows = SweepRequest(
        config=train,
        data_dir=str(asked.data.resolve()),
        limits=bench.loader_limits(train, manifest, together, None),
        window_s=asked.window_s,
        budget_s=60 * asked.minutes,
        trial_timeout_s=asked.trial_timeout_s,
        storage=bench.storage(asked.data),
    )
    with contextlib.closing(TokenDataset.open(asked.data)) as dataset:
        others, real_shares = compare_with(windows.config, dataset, *windows.limits.most())
    request = BaselineRequest(
        windows=windows,
        others=others,
        rounds=asked.rounds,
        memory_budget_bytes=stored.profile.constraints.memory_budget_bytes,
        micro_batches=probe.micro_batches_per_step,
        device_used_before_bytes=bench.used_before(together),
        real_shares=real_shares,
        vocab_size=manifest.vocab_size,
        special_ids=manifest.special_ids.model_dump(),
    )
    ledger = report_directory(stored.path, asked.reports) / "ledger"
    with bench.display.show(f"baseline {train.model.name}", most_s=60 * asked.minutes) as update:
        trials = len(others) + (len(others) + 1) * asked.rounds
        runner = bench.runner(ledger, fingerprint, update, expected_trials=trials)
        found = Comparison(request=request, runner=runner).run()
    write_atomically(stored.path, profile_to_toml(with_baseline(stored.profile, found, runner)))
    return found
