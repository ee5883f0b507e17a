"""Activity of GPUs during a trial, as figures. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from autotune.trials.job_figures import GpuUseFigures
from autotune.trials.outcomes import Measured, Outcome
from trainer.formats.gpu_activity import activity_of, combine_known, mean_share
from trainer.formats.gpus import GpuSample, GpuSeries


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
    activity = activity_of(samples, counters)
    # 1 for a sample at the power cap, 0 for another; their mean is the share.
    is_capped_by_sample = [
        "sw_power_cap" in sample.throttle_reasons
        for sample in samples
        if sample.throttle_reasons is not None
    ]
    return GpuUseFigures(
        samples=len(samples),
        utilisation_share=activity.busy_share,
        power_w=activity.power_w,
        used_bytes=combine_known(max, (sample.used_bytes for sample in samples)),
        sm_clock_mhz=activity.sm_clock_mhz,
        temperature_c=combine_known(max, (sample.temperature_c for sample in samples)),
        power_capped_share=combine_known(statistics.fmean, is_capped_by_sample),
        lacking=_why_no_utilisation(series),
        gpm_windows=len(counters),
        gpm_sm_share=activity.sm_active_share,
        gpm_occupancy_share=mean_share(interval.sm_occupancy for interval in counters),
        gpm_tensor_share=activity.tensor_active_share,
        gpm_dram_share=activity.dram_active_share,
        gpm_pcie_rx_bytes_per_s=combine_known(
            statistics.fmean, (interval.pcie_rx_bytes_per_s for interval in counters)
        ),
        gpm_lacking=_why_no_counters(series),
    )


def _why_no_utilisation(series: GpuSeries) -> str | None:
    """Return the reason why no sample has a utilisation; None if one has."""
    samples = series.samples
    if mean_share(sample.utilisation for sample in samples) is not None:
        return None
    if samples and "utilisation" in samples[-1].missing:
        return samples[-1].missing["utilisation"]
    return series.lacking or "no sample fell into the window"


def _why_no_counters(series: GpuSeries) -> str | None:
    """Return the reason why there are no hardware counters; None if there are some."""
    if series.gpm:
        return None
    return series.gpm_lacking or "no counter interval fell into the window"
