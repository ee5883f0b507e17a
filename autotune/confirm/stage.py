"""The confirm phase: the rate that a profile promises, and that training delivers."""

from autotune.base.defaults import CONFIRM_ROUNDS
from autotune.base.files import write_atomically
from autotune.confirm.measure import SplitRunner
from autotune.confirm.training import ConfirmedTraining
from autotune.errors import OutOfTime
from autotune.evidence.confirm import TOKENS, ConfirmEvidence, DeliveredTraining
from autotune.evidence.kernels import StepKernels
from autotune.evidence.profile import Profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.trials.job_figures import ShortTrainingFigures
from autotune.trials.outcomes import Measured
from autotune.trials.rounds import Rounds
from autotune.trials.runner import TrialRunner


def confirm_profile(
    training: ConfirmedTraining,
    *,
    budget_s: float,
    training_s: float,
    max_rounds: int = CONFIRM_ROUNDS,
) -> ConfirmEvidence:
    """Measure a profile's settings as training will run, and write the result.

    If another micro-batch of the same global batch is faster, the profile gets it.

    Args:
        training: Training from a profile on this machine.
        budget_s: Time budget of windows and training.
        training_s: Time of a training at the end, its start included.
        max_rounds: Most rounds of windows.

    Raises:
        OutOfTime: If the deadline leaves no time for three rounds.
        BadInput: If your code failed in a window.
        Undecided: If a window of the chosen size failed.
    """
    stored = training.stored
    # Besides windows, kernels are profiled and a training runs.
    expected_trials = max_rounds * len(training.sizes) + 2
    request = training.windows.request
    with training.bench.phase(
        "confirm", stored.path, request, expected_trials
    ) as runner:
        windows = Rounds(runner=runner)
        splits = SplitRunner(
            training=training,
            windows=windows,
            budget_s=max(0.0, budget_s - training_s),
            max_rounds=max_rounds,
        )
        size = splits.run()
        rows = splits.rows(size)
        kernels = training.kernels(runner, rows[0])
        promised = splits.promised(size).interval()
        evidence = ConfirmEvidence(
            unit=None if splits.unit == TOKENS else splits.unit,
            rows=rows,
            num_workers=training.num_workers,
            local_ranks=training.windows.local_ranks,
            promised_tokens_per_s=promised.value,
            promised_low=promised.low,
            promised_high=promised.high,
            not_delivered="not begun",
            not_verified=training.not_verified,
            kernels=kernels if isinstance(kernels, StepKernels) else None,
            not_profiled=kernels if isinstance(kernels, str) else None,
            window_s=request.window_s,
            windows=windows.windows,
            seconds=round(windows.seconds, 3),
        )
        profile = training.confirmed(stored.profile, evidence, runner)
        # Written before the training, which may read it.
        write_atomically(stored.path, profile_to_toml(profile))
        evidence = _with_training(runner, training, profile, evidence, training_s)
    profile = training.confirmed(profile, evidence, runner)
    write_atomically(stored.path, profile_to_toml(profile))
    return evidence


def _with_training(
    runner: TrialRunner,
    training: ConfirmedTraining,
    profile: Profile,
    evidence: ConfirmEvidence,
    training_s: float,
) -> ConfirmEvidence:
    """Return the evidence with the result of a short training.

    Args:
        runner: Runner of the trial.
        training: Training from the profile.
        profile: The profile, which has the evidence.
        evidence: Evidence of the windows.
        training_s: Time of the training, its start included.
    """
    try:
        outcome, without_rate = training.train(profile, runner, training_s)
    except OutOfTime:
        return _not_delivered(evidence, "no time was left")
    seconds = evidence.seconds + runner.finished[-1].seconds
    evidence = evidence.model_copy(update={"seconds": round(seconds, 3)})
    if not isinstance(outcome, Measured):
        return _not_delivered(evidence, outcome.detail)
    figures = ShortTrainingFigures.of(outcome)
    if figures.tokens_per_s is None:
        return _not_delivered(evidence, without_rate)
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
