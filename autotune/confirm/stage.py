"""The confirm phase of a tuning: windows, the choice made again, a short training."""

from dataclasses import replace

from autotune.base.defaults import CONFIRM_ROUNDS
from autotune.base.files import write_atomically
from autotune.base.units import format_seconds
from autotune.confirm.decide import rivals
from autotune.confirm.measure import SplitRunner
from autotune.confirm.profile_kernels import profile_kernels
from autotune.confirm.short_training import END_TIMEOUT_S, ShortTraining
from autotune.confirm.values import ShortTrainingRequest
from autotune.errors import OutOfTime
from autotune.evidence.confirm import ConfirmEvidence, DeliveredTraining
from autotune.evidence.kernels import StepKernels
from autotune.evidence.profile import Profile
from autotune.machine.measured_device import local_ranks
from autotune.profiles.decide.micro_batch import measured_splits
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.recorded_trials import add_evidence
from autotune.profiles.store import StoredProfile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.mlm.workers.windows import training_windows
from autotune.trials.job_figures import ShortTrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner
from autotune.trials.session import Session
from autotune.trials.sweep_request import SweepRequest


def confirm_profile(
    bench: Session,
    stored: StoredProfile,
    request: SweepRequest,
    *,
    training_s: float,
    max_rounds: int = CONFIRM_ROUNDS,
) -> ConfirmEvidence:
    """Measure the profile's settings as training will run, and write the result.

    If a split of the global batch is faster than that of the profile, the profile gets
    it.

    Args:
        bench: Session on the machine and the dataset.
        stored: Profile that was probed here.
        request: Windows to measure. Their time budget includes the training.
        training_s: Time of a training at the end, its start included.
        max_rounds: Most rounds of windows.

    Raises:
        ProfileRejected: If the profile is of another machine, model or dataset.
        OutOfTime: If the deadline leaves no time for three rounds.
        Undecided: If a window of the chosen split failed.
    """
    request = replace(request, budget_s=max(0.0, request.budget_s - training_s))
    train = stored.profile.train
    probe = require_local_probe(stored, bench.fingerprint(train.model))
    ranks = local_ranks(bench.site, request.local_ranks or probe.local_ranks)
    steps = measured_splits(
        probe.curve, global_batch_size=train.global_batch_size, ranks=ranks
    )
    sizes = [train.micro_batch_size, *rivals(steps, train.micro_batch_size)]
    # Besides windows, kernels are profiled and a training runs.
    expected_trials = max_rounds * len(sizes) + 2
    with bench.phase(
        "confirm", stored.path, train.model, request, expected_trials
    ) as trial_runner:
        windows = Rounds(runner=trial_runner)
        splits = SplitRunner(
            training=training_windows(bench, train, request, ranks),
            probe=probe,
            sizes=sizes,
            windows=windows,
            max_rounds=max_rounds,
        )
        size = splits.run()
        rows = splits.rows(size)
        kernels = profile_kernels(
            trial_runner,
            train,
            rows[0],
            request=request,
            manifest=bench.manifest,
            ranks=ranks,
        )
        promised = splits.promised(size).interval()
        evidence = ConfirmEvidence(
            rows=rows,
            num_workers=train.data.num_workers,
            local_ranks=ranks,
            promised_tokens_per_s=promised.value,
            promised_low=promised.low,
            promised_high=promised.high,
            not_delivered="not begun",
            kernels=kernels if isinstance(kernels, StepKernels) else None,
            not_profiled=kernels if isinstance(kernels, str) else None,
            window_s=request.window_s,
            windows=windows.windows,
            seconds=round(windows.seconds, 3),
        )
        train = train.model_copy(update={"micro_batch_size": size})
        profile = add_evidence(stored.profile, "confirm", evidence, trial_runner, train)
        # Written before the training, which reads it.
        write_atomically(stored.path, profile_to_toml(profile))
        training = ShortTraining(
            profile=stored.path,
            data=request.data,
            torch_version=bench.site.versions["torch"],
        )
        evidence = _with_training(trial_runner, training, profile, training_s)
    profile = add_evidence(profile, "confirm", evidence, trial_runner, train)
    write_atomically(stored.path, profile_to_toml(profile))
    return evidence


def _with_training(
    runner: TrialRunner, training: ShortTraining, profile: Profile, training_s: float
) -> ConfirmEvidence:
    """Return the evidence of a profile with the result of a short training.

    Args:
        runner: Runner of the trial.
        training: Training from the profile.
        profile: The profile, which has evidence of a probe and of a confirmation.
        training_s: Time of the training, its start included.
    """
    evidence, probe = profile.evidence.confirm, profile.evidence.probe
    assert evidence is not None and probe is not None
    train = profile.train
    tokens_per_step = train.global_batch_size * probe.tokens_per_sequence
    step_s = tokens_per_step / evidence.promised_tokens_per_s
    request = ShortTrainingRequest(
        config=train,
        seconds=training_s,
        step_s=step_s,
        local_ranks=evidence.local_ranks,
    )
    trial = request.trial(timeout_s=training_s + 2 * END_TIMEOUT_S)

    try:
        outcome = runner.run(
            trial,
            f"training by the trainer's own loop, {format_seconds(training_s)}",
            measure_by=training.run_trial,
        )
    except OutOfTime:
        return _not_delivered(evidence, "no time was left")
    seconds = evidence.seconds + runner.finished[-1].seconds
    evidence = evidence.model_copy(update={"seconds": round(seconds, 3)})
    if not isinstance(outcome, Measured):
        return _not_delivered(evidence, outcome.detail)
    figures = ShortTrainingFigures.of(outcome)
    if figures.tokens_per_s is None:
        return _not_delivered(
            evidence,
            f"{format_seconds(training_s)} are too short for a start and steps of"
            f" about {format_seconds(step_s)}",
        )
    delivered = DeliveredTraining(
        tokens_per_s=figures.tokens_per_s,
        steps=figures.steps,
        seconds=figures.seconds,
        mfu=figures.mfu,
    )
    return evidence.model_copy(update={"delivered": delivered, "not_delivered": None})


def _not_delivered(evidence: ConfirmEvidence, reason: str) -> ConfirmEvidence:
    """Return the evidence with the reason why there is no rate of a training."""
    return evidence.model_copy(update={"not_delivered": reason})
