"""Rates of a training run, compared with the peak of its GPU. Pure."""

from autotune.machine.values import MeasuredGpu
from autotune.trials.decide.plausibility import (
    GpuRate,
    check_rates,
    check_takes_time,
    least_flops_per_token,
    number_format_of,
)
from trainer.formats.recorded_settings import settings_of
from trainer.formats.run_record import Run


def check_run(run: Run) -> None:
    """Check that the rates of a training run are possible on its GPU.

    Raises:
        Undecided: If its GPU cannot reach a rate.
        MachineLacks: If its GPU takes no time to compute.
    """
    header = run.header
    name = f"the run {run.directory.name}"
    gpu = MeasuredGpu(name=header.device, driver=header.driver)
    check_takes_time(gpu, f"{name}: its tokens/s")
    if not run.steps:
        return
    flops_per_token = least_flops_per_token(
        settings_of(header.config), header.parameters
    )
    peak_flops_per_s = header.peak_flops_per_s or 0.0
    flops_per_s_by_step = [
        max(
            step.model_flops_per_s_per_rank,
            flops_per_token * (step.tokens_per_s / header.world_size),
            (step.mfu or 0.0) * peak_flops_per_s,
        )
        for step in run.steps
    ]
    rate = GpuRate(
        name=name,
        per_s=max(flops_per_s_by_step),
        kind=number_format_of(header.config),
    )
    check_rates(header.device, [rate])
