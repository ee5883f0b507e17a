"""The workers stage: the smallest number of loader workers at the probed micro-batch, written into the profile."""

import sys
from dataclasses import dataclass
from pathlib import Path

from autotune.core.defaults import TRIAL_TIMEOUT_S, WINDOW_S
from autotune.core.evidence import ProbeEvidence, WorkersEvidence
from autotune.core.profile import profile_to_toml
from autotune.decide.fingerprint import compare, compare_for_replay
from autotune.search.gpu_source import gpu_source
from autotune.search.joint import gap_remains, search_joint
from autotune.search.profiles import StoredProfile, report_directory, with_workers
from autotune.search.site import local_ranks
from autotune.search.workers import Sweep, SweepRequest, evidence
from autotune.store import write_atomically
from autotune.tuning.bench import Bench, check_belongs
from trainer.dataset import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersAsked:
    """How loader workers are to be counted."""

    data: Path
    reports: Path
    minutes: float
    ranks: int | None = None
    """None: as the profile was probed."""
    max_workers: int | None = None
    window_s: float = WINDOW_S
    replayed_step_s: float | None = None
    joint_trials: int = 12
    trial_timeout_s: float = TRIAL_TIMEOUT_S


def count_workers(
    bench: Bench, stored: StoredProfile, probe: ProbeEvidence, asked: WorkersAsked, manifest: Manifest
) -> WorkersEvidence:
    """Sweep, and write what was found into the profile.

    Raises:
        ProfileRefused: If the profile is of another machine, model or dataset.
        Undecided: If a window could not be measured.
    """
    train = stored.profile.train
    fingerprint = bench.fingerprint(train.model, manifest)
    replayed = asked.replayed_step_s is not None
    check_belongs(stored, fingerprint, compare_for_replay if replayed else compare)
    together = asked.ranks or probe.local_ranks
    together = together if replayed else local_ranks(bench.site, together)
    config = train.model_copy(update={"device": "cpu"}) if replayed else train
    request = SweepRequest(
        config=config,
        data_dir=str(asked.data.resolve()),
        limits=bench.loader_limits(config, manifest, together, asked.max_workers),
        window_s=asked.window_s,
        budget_s=60 * asked.minutes,
        trial_timeout_s=asked.trial_timeout_s,
        replayed_step_s=asked.replayed_step_s,
        storage=bench.storage(asked.data),
    )
    if warning := request.limits.warning():
        sys.stderr.write(f"warn: {warning}\n")
    with bench.display.show(f"workers {train.model.name}", most_s=request.budget_s) as update:
        ledger = report_directory(stored.path, asked.reports) / "ledger"
        sweep = Sweep(request=request, runner=bench.runner(ledger, fingerprint, update, expected_trials=24))
        found = _swept(bench, sweep, asked.joint_trials)
    write_atomically(stored.path, profile_to_toml(with_workers(stored.profile, found, sweep.runner)))
    return found


def _swept(bench: Bench, sweep: Sweep, joint_trials: int) -> WorkersEvidence:
    choice = sweep.run()
    joint = None
    if joint_trials and gap_remains(choice) and not sweep.time_is_over:
        joint = search_joint(sweep, choice, joint_trials)
    found = evidence(
        sweep,
        choice,
        gpu_source=gpu_source(bench.site, sweep.every, replayed=sweep.request.replayed_step_s is not None),
        disk=bench.site.host.disks[0],
    )
    return found.model_copy(update={"joint": joint})
