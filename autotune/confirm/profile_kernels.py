"""Profile of the kernels of a step with the confirmed size."""

from typing import Any

from autotune.errors import BadInput, OutOfTime
from autotune.evidence.kernels import StepKernels
from autotune.kernels.decide.bounds import step_kernels
from autotune.kernels.decide.trace import NO_KERNELS
from autotune.memory.values import KernelsRequest
from autotune.trials.job_figures import KernelFigures
from autotune.trials.outcomes import Measured, describe
from autotune.trials.runner import TrialRunner


def profile_kernels(
    runner: TrialRunner,
    request: KernelsRequest,
    words: str,
    *,
    timeout_s: float,
    **local: Any,
) -> StepKernels | str:
    """Return the kernels of a step, or the reason why they were not profiled.

    Args:
        runner: Runner of the trial.
        request: The step, at the confirmed size.
        words: The subject in words.
        timeout_s: Time limit of the trial.
        local: Inputs of the trial that depend on this machine.
    """
    trial = request.trial(timeout_s=timeout_s, **{"limit_s": timeout_s, **local})
    try:
        outcome = runner.run(trial, f"{words}: kernels of a step")
    except OutOfTime:
        return "no time was left"
    except BadInput as error:
        return error.message
    if not isinstance(outcome, Measured):
        return describe(outcome)
    figures = KernelFigures.of(outcome)
    if not figures.kernels:
        return NO_KERNELS
    units_per_micro_batch = request.size * request.units_per_size
    return step_kernels(
        figures,
        micro_batch_size=request.size,
        micro_batches=round(figures.units_per_step / units_per_micro_batch),
    )
