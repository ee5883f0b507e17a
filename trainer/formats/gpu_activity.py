"""Activity of a GPU over a time, from its samples and counter windows. Pure."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainer.formats.gpus import GpmWindow, GpuSample

Known = TypeVar("Known", bound=float)
Combined = TypeVar("Combined")

GPU_ACTIVITY_VARIABLE = "AUTOTUNE_GPU_ACTIVITY"
"""Environment variable: with ``0``, training does not read the activity of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuActivity:
    """Activity of a GPU over a time; a figure is None if it was not read.

    Shares are means, 0 to 1.
    """

    busy_share: float | None = None
    """Share of time in which some kernel ran, even one that uses a single SM or waits
    for another rank."""
    memory_busy_share: float | None = None
    """Share of time in which device memory was read or written."""
    sm_active_share: float | None = None
    """Share of SMs that were busy."""
    tensor_active_share: float | None = None
    """Share of time in which the SMs did any tensor operation."""
    dram_active_share: float | None = None
    """Share of the theoretical memory bandwidth that was used."""
    power_w: float | None = None
    """Mean power, in watts."""
    sm_clock_mhz: float | None = None
    """Median clock of the SMs."""


def activity_of(
    samples: Sequence[GpuSample], windows: Sequence[GpmWindow]
) -> GpuActivity:
    """Return the activity of one GPU.

    Args:
        samples: Samples in order of time.
        windows: Counter windows.
    """
    return GpuActivity(
        busy_share=mean_share(sample.utilisation for sample in samples),
        memory_busy_share=mean_share(sample.memory_utilisation for sample in samples),
        sm_active_share=mean_share(window.sm_utilisation for window in windows),
        tensor_active_share=mean_share(window.tensor_active for window in windows),
        dram_active_share=mean_share(window.dram_active for window in windows),
        power_w=_mean_power_w(samples),
        sm_clock_mhz=combine_known(
            _median, (sample.sm_clock_mhz for sample in samples)
        ),
    )


def _mean_power_w(samples: Sequence[GpuSample]) -> float | None:
    """Return the mean power from the first sample to the last, in watts.

    If the GPU counts energy, the power follows from the energy used. Otherwise it is
    the mean of the samples' power, which is less exact: since Hopper, a sample of power
    is a mean over the last second, part of which lies before the window.

    Returns:
        The power, or None if the GPU reports neither.
    """
    energy_readings = [
        (sample.time_s, sample.energy_j)
        for sample in samples
        if sample.energy_j is not None
    ]
    if energy_readings:
        start_s, start_j = energy_readings[0]
        end_s, end_j = energy_readings[-1]
        if end_s > start_s and end_j > start_j:
            return (end_j - start_j) / (end_s - start_s)
    return combine_known(statistics.fmean, (sample.power_w for sample in samples))


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def mean_share(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known shares; None if there are none.

    The mean is limited to 0 to 1, as counters that are read at slightly different times
    give shares a little above 1.
    """
    mean = combine_known(statistics.fmean, values)
    return None if mean is None else min(1.0, max(0.0, mean))


def combine_known(
    combine: Callable[[list[Known]], Combined], values: Iterable[Known | None]
) -> Combined | None:
    """Combine the finite values with a function; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return combine(known) if known else None
