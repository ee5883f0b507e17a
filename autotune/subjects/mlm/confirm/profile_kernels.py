"""Profile of the kernels of a step with the confirmed split."""

from autotune.errors import OutOfTime
from autotune.evidence.confirm import SplitRates
from autotune.evidence.kernels import StepKernels
from autotune.kernels.decide.bounds import step_kernels
from autotune.kernels.decide.trace import NO_KERNELS
from autotune.memory.size_probe import KERNEL_STEPS, step_fields
from autotune.memory.values import KernelsRequest
from autotune.subjects.mlm.memory.contents import contents_of
from autotune.subjects.mlm.subject import MlmSubject
from autotune.trials.job_figures import KernelFigures
from autotune.trials.outcomes import Measured, describe
from autotune.trials.runner import TrialRunner
from autotune.trials.sweep_request import SweepRequest

MOST_MICRO_BATCHES = 4
"""Most micro-batches of a profiled step. All of them have the same kernels."""


def profile_kernels(
    runner: TrialRunner,
    subject: MlmSubject,
    split: SplitRates,
    *,
    request: SweepRequest,
) -> StepKernels | str:
    """Return the kernels of a step, or the reason why they were not profiled.

    Args:
        runner: Runner of the trial.
        subject: The trainer with the settings of the training.
        split: Split of the global batch.
        request: Dataset, and the time limit of a trial.
    """
    train = subject.config
    contents = contents_of(request.data, train.layout, train.seq_length_tokens)
    size = split.micro_batch_size
    micro_batches = min(split.gradient_accumulation_steps, MOST_MICRO_BATCHES)
    steps = KERNEL_STEPS[train.device]
    is_packed = train.layout == "packed"
    documents = max(1.0, contents.mean_samples) if is_packed else 1.0
    kernels_request = KernelsRequest(
        **step_fields(
            subject.model_copy(update={"documents_per_sequence": documents}),
            {"micro_batch_size": size, "micro_batches": micro_batches},
            steps,
            device=train.device,
            local_ranks=subject.local_ranks,
        ),
        memory_budget_bytes=None,
        number_format=train.precision,
        document_tokens=train.seq_length_tokens / documents,
    )
    trial = kernels_request.trial(
        timeout_s=request.trial_timeout_s, limit_s=request.trial_timeout_s
    )
    try:
        outcome = runner.run(trial, f"{train.model.name}: kernels of a step")
    except OutOfTime:
        return "no time was left"
    if not isinstance(outcome, Measured):
        return describe(outcome)
    figures = KernelFigures.of(outcome)
    if not figures.kernels:
        return NO_KERNELS
    return step_kernels(figures, micro_batch_size=size, micro_batches=micro_batches)
