"""Activity of GPUs during a trial, as figures. Pure."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from autotune.machine.values import GpuSample, GpuSeries
from autotune.trials.job_figures import GpuUseFigures
from autotune.trials.outcomes import Measured, Outcome

Known = TypeVar("Known", bound=float)
Combined = TypeVar("Combined")


def with_gpu_activity(outcome: Outcome, series: Iterable[GpuSeries]) -> Outcome:
    """Return the outcome with the activity of each GPU during its timed window.

    The figures get a key ``gpus``: for each GPU its ``GpuUseFigures``, and under
    ``series`` the samples themselves, by field. An outcome without a window is returned
    as it is.

    Args:
        outcome: Outcome of a trial.
        series: Activity of each of the trial's GPUs, also from before and after the
            window.
    """
    if not isinstance(outcome, Measured) or "window_start_s" not in outcome.figures:
        return outcome
    gpus = []
    for gpu_series in series:
        window = gpu_series.between(
            outcome.figures["window_start_s"], outcome.figures["window_end_s"]
        )
        figures = window_gpu_use(window).model_dump()
        gpus.append(figures | {"series": _values_by_field(window.samples)})
    return Measured(figures=outcome.figures | {"gpus": gpus})


def _values_by_field(samples: Sequence[GpuSample]) -> dict[str, list[Any]]:
    """Return the values that each field has in the samples, in their order."""
    if not samples:
        return {}
    records = [asdict(sample) for sample in samples]
    return {name: [record[name] for record in records] for name in records[0]}


def window_gpu_use(series: GpuSeries) -> GpuUseFigures:
    """Return the figures of one GPU's activity over a window of time.

    Args:
        series: Samples and counter intervals that lie within the window.
    """
    samples = series.samples
    counters = series.gpm
    # 1 for a sample at the power cap, 0 for another; their mean is the share.
    is_capped_by_sample = [
        "sw_power_cap" in sample.throttle_reasons
        for sample in samples
        if sample.throttle_reasons is not None
    ]
    return GpuUseFigures(
        samples=len(samples),
        utilisation_share=_mean_share(sample.utilisation for sample in samples),
        power_w=_mean_power_w(samples),
        used_bytes=combine_known(max, (sample.used_bytes for sample in samples)),
        sm_clock_mhz=combine_known(
            statistics.median, (sample.sm_clock_mhz for sample in samples)
        ),
        temperature_c=combine_known(max, (sample.temperature_c for sample in samples)),
        power_capped_share=combine_known(statistics.fmean, is_capped_by_sample),
        lacking=_why_no_utilisation(series),
        gpm_windows=len(counters),
        gpm_sm_share=_mean_share(interval.sm_utilisation for interval in counters),
        gpm_occupancy_share=_mean_share(interval.sm_occupancy for interval in counters),
        gpm_tensor_share=_mean_share(interval.tensor_active for interval in counters),
        gpm_dram_share=_mean_share(interval.dram_active for interval in counters),
        gpm_pcie_rx_bytes_per_s=combine_known(
            statistics.fmean, (interval.pcie_rx_bytes_per_s for interval in counters)
        ),
        gpm_lacking=_why_no_counters(series),
    )


def _why_no_utilisation(series: GpuSeries) -> str | None:
    """Return the reason why no sample has a utilisation; None if one has."""
    samples = series.samples
    if _mean_share(sample.utilisation for sample in samples) is not None:
        return None
    if samples and "utilisation" in samples[-1].missing:
        return samples[-1].missing["utilisation"]
    return series.lacking or "no sample fell into the window"


def _why_no_counters(series: GpuSeries) -> str | None:
    """Return the reason why there are no hardware counters; None if there are some."""
    if series.gpm:
        return None
    return series.gpm_lacking or "no counter interval fell into the window"


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


def _mean_share(values: Iterable[float | None]) -> float | None:
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
