"""The workers phase: find the number of DataLoader workers for a probed profile."""

from autotune.base.files import write_atomically
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.measured_device import local_ranks
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile, before_sweep, with_data
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.bench import SubjectBench
from autotune.subjects.mlm.subject import MOST_MICRO_BATCHES, MlmSubject
from autotune.subjects.mlm.workers.windows import training_windows
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest
from autotune.workers.stage import sweep_on
from autotune.workers.windows import SubjectWindows
from trainer.formats.train_config import TrainConfig


def count_workers(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> WorkersEvidence:
    """Find the smallest sufficient number of workers, and write it into the profile.

    Args:
        bench: Bench of the profile's model and dataset.
        stored: Profile that was probed here.
        request: Windows to measure, with their time budget.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
        OutOfTime: If the deadline leaves no time for the first three rounds.
        Undecided: If a window failed.
    """
    windows = _windows_of(bench, stored, request)
    evidence, runner = sweep_on(bench, windows, stored.path)
    profile = add_workers(stored.profile, evidence, runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return evidence


def known_step_s(
    train: TrainConfig, probe: ProbeEvidence, request: SweepRequest
) -> float | None:
    """Return the seconds of an optimizer step of the windows of a profile.

    Returns:
        The seconds; None if the probe did not time the micro-batch size.
    """
    micro_batch_s = request.replayed_step_s
    if micro_batch_s is None:
        micro_batch_s = probe.step_s_at(train.micro_batch_size)
    if micro_batch_s is None:
        return None
    split = split_global_batch(
        train.global_batch_size,
        train.micro_batch_size,
        request.local_ranks or probe.local_ranks,
    )
    return micro_batch_s * min(MOST_MICRO_BATCHES, split.gradient_accumulation_steps)


def _windows_of(
    bench: SubjectBench, stored: StoredProfile, request: SweepRequest
) -> SubjectWindows[MlmSubject]:
    """Return the windows of a probed profile, on as many ranks as requested or probed.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
    """
    is_replayed = request.replayed_step_s is not None
    config = before_sweep(stored.profile)
    probe = require_local_probe(stored, bench.fingerprint, replayed=is_replayed)
    ranks = request.local_ranks or probe.local_ranks
    if is_replayed:
        # A replay computes nothing, so its ranks need no GPUs.
        config = config.model_copy(update={"device": "cpu"})
    else:
        ranks = local_ranks(bench.site, ranks)
    return training_windows(bench, config, request, ranks)


def add_workers(
    profile: Profile, evidence: WorkersEvidence, runner: TrialRunner
) -> Profile:
    """Return the profile with the loader settings that a sweep chose."""
    train = with_data(before_sweep(profile), evidence.loader_settings)
    return add_evidence(profile, "workers", evidence, runner, train)
