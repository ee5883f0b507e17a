"""Rejection of rates that no GPU can reach, and of all rates without computation. Pure.

A faulty clock, driver or kernel gives figures that look like an enormous speed. To
detect them, each rate is converted to the FLOP/s, or bytes/s of links, that it takes at
least, and compared with the GPU's data sheet. A GPU that takes no time to compute, as
``MeasuredGpu`` knows, has no rate at all.

The rates here are those of trials; ``profile_rates`` and ``run_rates`` check profiles
and training runs.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autotune.errors import MachineLacks, Undecided
from autotune.machine.values import MeasuredGpu
from autotune.trials.outcomes import Measured
from autotune.trials.values import Trial
from trainer.formats.encoder_shape import encoder_shape
from trainer.formats.gpu_peaks import NumberFormat, Peak, find_peak, matmul_format
from trainer.formats.recorded_settings import settings_of
from trainer.formats.train_config import TrainConfig

SLACK = 1.05
"""Tolerance over the data sheet, as a GPU may be delivered with a little more; in
practice none reaches the sheet."""
RATE_JOBS = frozenset({"window", "short_training", "links", "gradient_sync"})
"""Jobs that always measure a rate; a ``step`` may measure memory alone."""
_MULTIPLY_AND_ADD = 2
"""FLOPs of a matmul for each weight and token."""
_FORWARD_AND_BACKWARD = 3
"""Matmuls of a training step in units of those of its forward pass: the backward pass
has twice as many."""
_LEAST_S = 1e-12
"""Time in seconds that replaces a shorter one, so that no rate is divided by zero."""
_FLOPS_JOBS = ("step", "window", "short_training", "gradient_sync")
"""Jobs that train, so that their rate is one of FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRate:
    """A measured rate of one GPU."""

    name: str
    """Name of the measurement, for messages."""
    per_s: float
    """FLOP/s of the GPU, or bytes/s of its links."""
    kind: NumberFormat | Literal["links"] = "bf16"
    """Kind of the rate: number format of its matmuls, or ``links``."""

    def limit_per_s(self, peak: Peak) -> float | None:
        """Return the GPU's peak for this kind of rate; None if it is not known."""
        if self.kind == "links":
            # The peak is that of both directions together. An all-reduce may come close
            # to it, as a reducing switch (NVLink SHARP) halves the bytes that a GPU
            # sends.
            return peak.link_bytes_per_s
        return peak.matmul_flops_per_s(self.kind)

    @property
    def unit(self) -> str:
        """Unit of the rate after division by 10^12."""
        return "TB/s of links" if self.kind == "links" else f"TFLOP/s in {self.kind}"


def check_rates(gpu_name: str | None, rates: Iterable[GpuRate]) -> None:
    """Check that a GPU can reach all of these rates.

    Args:
        gpu_name: Name of the GPU; None for a CPU. CPUs and unknown GPUs have no limit.
        rates: Measured rates.

    Raises:
        Undecided: If the GPU cannot reach one of them.
    """
    peak = None if gpu_name is None else find_peak(gpu_name)
    if peak is None:
        return
    for rate in rates:
        limit_per_s = rate.limit_per_s(peak)
        if limit_per_s is not None and rate.per_s > SLACK * limit_per_s:
            raise Undecided(
                f"{rate.name}: {rate.per_s / 1e12:,.4g} {rate.unit} measured on"
                f" {gpu_name} exceeds its peak of {limit_per_s / 1e12:,.4g}: the"
                " measurement is wrong and is discarded",
                next_step=(
                    "Check the driver and the clocks (nvidia-smi -q -d CLOCK), then"
                    " measure again."
                ),
            )


def is_possible(gpu_name: str | None, rates: Iterable[GpuRate]) -> bool:
    """Return whether a GPU can reach all of these rates, as ``check_rates`` does."""
    try:
        check_rates(gpu_name, rates)
    except Undecided:
        return False
    return True


def check_takes_time(gpu: MeasuredGpu, subject: str) -> None:
    """Check that a rate is measured on a GPU that takes time to compute.

    Args:
        gpu: The GPU.
        subject: Name of the rate, for the message.

    Raises:
        MachineLacks: If the GPU takes no time.
    """
    if not gpu.takes_time:
        raise MachineLacks(
            f"{subject} cannot be measured on a pretended {gpu.name} (driver"
            f" {gpu.driver}): its kernels do nothing",
            next_step=(
                "Measure on a real GPU. On this one only memory can be measured:"
                " autotune probe"
            ),
        )


def has_rate(trial: Trial, outcome: Measured, gpu: MeasuredGpu) -> bool:
    """Return whether a trial measured a rate that its device can reach.

    CPUs and unknown GPUs have no limit.
    """
    return (
        trial.is_timed
        and gpu.takes_time
        and is_possible(gpu.name, rates_of_trial(trial, outcome))
    )


def rates_of_trial(trial: Trial, outcome: Measured) -> Iterator[GpuRate]:
    """Yield the rates that a trial measured, each of one GPU.

    Jobs that measure neither FLOPs nor links have none.
    """
    figures = outcome.figures
    name = f"the trial {trial.job!r}"
    # A replayed step computes nothing.
    is_replayed = bool(trial.measured.get("replayed_step_s"))
    if trial.job in _FLOPS_JOBS and not is_replayed:
        yield GpuRate(
            name=name,
            per_s=_training_flops_per_s(trial, figures),
            kind=number_format_of(trial.config),
        )
    if trial.job == "links":
        yield from _rates_of_links(name, figures)


def _rates_of_links(name: str, figures: dict[str, Any]) -> Iterator[GpuRate]:
    """Yield the rates of a ``links`` job: of matmuls, and of messages between ranks."""
    for flops_per_s in figures["matmul_flops_per_s"]:
        yield GpuRate(name=name, per_s=flops_per_s)
    for scope in ("all", "within", "between"):
        for size_bytes, seconds in figures.get(scope, ()):
            bytes_per_s = size_bytes / max(seconds, _LEAST_S)
            yield GpuRate(name=name, per_s=bytes_per_s, kind="links")
    for bytes_per_s in figures.get("neighbours_bytes_per_s", ()):
        yield GpuRate(name=name, per_s=bytes_per_s, kind="links")


def _training_flops_per_s(trial: Trial, figures: dict[str, Any]) -> float:
    """Return the FLOP/s of one GPU in one of ``_FLOPS_JOBS``.

    A job may count its own FLOPs. If its count is below the least that its tokens take,
    it is wrong, and the least is returned.
    """
    # The figures may be of an older trial log, so they are read by key.
    flops_per_token = least_flops_per_token(settings_of(trial.config), None)
    local_ranks: int = figures.get("local_ranks") or 1
    if trial.job == "window":
        counted_flops_per_s = figures.get("model_flops_per_s") or 0.0
        least_flops_per_s = flops_per_token * figures.get("units_per_s", 0.0)
        flops_per_s = max(counted_flops_per_s, least_flops_per_s)
        return float(flops_per_s / local_ranks)
    if trial.job == "short_training":
        ranks: int = trial.measured["local_ranks"]
        return float(flops_per_token * (figures["tokens_per_s"] or 0.0) / ranks)
    if not figures["step_s"]:
        return 0.0
    step_s = max(statistics.median(figures["step_s"]), _LEAST_S)
    if trial.job == "gradient_sync":
        flops = flops_per_token * figures["tokens_per_step"]
        return float(flops / step_s / _synchronised_ranks(trial, figures))
    counted_flops = figures.get("model_flops_per_step") or 0.0
    least_flops = flops_per_token * figures.get("units_per_step", 0.0)
    return float(max(counted_flops, least_flops) / step_s / local_ranks)


def _synchronised_ranks(trial: Trial, figures: dict[str, Any]) -> float:
    """Return the number of ranks of a ``gradient_sync`` trial.

    It is the global batch divided by the sequences of one rank, at least 1.
    """
    sequences_per_rank: int = (
        figures["micro_batch_size"] * figures["gradient_accumulation_steps"]
    )
    global_batch_size: int = trial.config.get("global_batch_size", 0)
    return max(1.0, global_batch_size / sequences_per_rank)


def least_flops_per_token(train: TrainConfig | None, parameters: int | None) -> float:
    """Return a lower bound on the FLOPs that training takes for each token.

    For a known architecture, it counts the matmuls with the weights of its layers, and
    leaves out attention, MLM head and embeddings. For any other, it is twice the number
    of parameters: a third of the usual count of six times, because the embedding table
    takes part in no matmul and may have most of the parameters.

    Args:
        train: Settings with the model's config; None if they cannot be read.
        parameters: Number of all parameters; None if it is not known.
    """
    shape = None if train is None else encoder_shape(train)
    if shape is not None and shape.layout is not None:
        flops = _FORWARD_AND_BACKWARD * _MULTIPLY_AND_ADD * shape.weights_per_token
        return float(flops)
    return float(_MULTIPLY_AND_ADD * (parameters or 0))


def number_format_of(config: dict[str, Any]) -> NumberFormat:
    """Return the number format of matmuls with these settings of the trainer.

    Settings of an older trial log or run may lack a key; the trainer's default replaces
    it.
    """
    return matmul_format(config.get("precision", "fp32"), tf32=config.get("tf32", True))
