"""Rules by which a trial's outcome is discarded, and activity of GPUs as figures.

Pure. Process ids do not identify the owner of memory, as a container sees other ids
than the host. So bytes are compared with a baseline from before this program used a
GPU; listed processes are only a hint.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from autotune.base.units import format_bytes, format_seconds
from autotune.machine.decide import MAX_UNEXPLAINED_GPU_BYTES
from autotune.machine.values import (
    GpuProcess,
    GpuSample,
    GpuSeries,
    Unavailable,
    throttle_faults,
)
from autotune.trials.job_figures import GpuUseFigures
from autotune.trials.outcomes import Contaminated, Measured, Outcome, OutOfMemory

MEMORY_TOLERANCE_BYTES = 64 * 2**20
"""Tolerated change of an idle GPU's used memory: the driver's own changes are MiB, a
CUDA context takes hundreds."""
MOST_SLOWED_SHARE = 0.1
"""Share of samples that may show a fault: intact air-cooled GPUs slow down for a moment
now and then."""

_GPM_SHARES = {
    "gpm_sm_share": "sm_utilisation",
    "gpm_occupancy_share": "sm_occupancy",
    "gpm_tensor_share": "tensor_active",
    "gpm_dram_share": "dram_active",
}
"""Field of ``GpmWindow`` for each share in ``GpuUseFigures``."""

Holders = tuple[GpuProcess, ...] | Unavailable
"""Processes that the driver lists on a GPU."""
Known = TypeVar("Known", bound=float)
Combined = TypeVar("Combined")


def is_above_baseline(
    baseline_bytes: int | Unavailable, used_bytes: int | Unavailable
) -> bool:
    """Return whether more memory is in use than before this program used the GPU.

    False if either figure is missing.
    """
    if isinstance(baseline_bytes, Unavailable) or isinstance(used_bytes, Unavailable):
        return False
    return used_bytes - baseline_bytes > MEMORY_TOLERANCE_BYTES


def describe_growth(
    gpu: str,
    used_bytes: int | Unavailable,
    holders: Holders,
    baseline_bytes: int | Unavailable,
    waited_s: float,
) -> str:
    """Describe the memory of a GPU that was not freed, and who holds it."""
    return (
        f"{gpu} still holds {_bytes_text(used_bytes)} after a wait of"
        f" {format_seconds(waited_s)}, up from {_bytes_text(baseline_bytes)} before the"
        f" first trial ({_holders_text(holders)})"
    )


def describe_slowdown(gpu: str, samples: Sequence[GpuSample]) -> str | None:
    """Describe the faults, heat or hardware slowdown, that lowered a GPU's clocks.

    A power cap is no fault. Return None if no fault lasted.
    """
    readings = [
        sample.throttle_reasons
        for sample in samples
        if sample.throttle_reasons is not None
    ]
    faults_by_reading = [throttle_faults(reasons) for reasons in readings]
    slowed_count = sum(bool(faults) for faults in faults_by_reading)
    if slowed_count == 0:
        return None
    # A slowdown in every sample is a fault, however few samples there are.
    most_tolerated = max(1, MOST_SLOWED_SHARE * len(readings))
    if slowed_count < len(readings) and slowed_count <= most_tolerated:
        return None
    readings_by_fault: Counter[str] = Counter()
    for faults in faults_by_reading:
        readings_by_fault.update(faults)
    shares = ", ".join(
        f"{fault} in {count} of {len(readings)} samples"
        for fault, count in readings_by_fault.items()
    )
    temperatures_c = [
        sample.temperature_c for sample in samples if sample.temperature_c is not None
    ]
    heat = f", at up to {max(temperatures_c)} °C" if temperatures_c else ""
    return f"{gpu} was slowed down: {shares}{heat}"


def describe_other_processes(gpu: str, samples: Sequence[GpuSample]) -> str | None:
    """Describe other processes than the trial's own that computed on a GPU.

    Return None if there were none.
    """
    counts = [
        sample.process_count for sample in samples if sample.process_count is not None
    ]
    shared_samples = sum(count > 1 for count in counts)
    if not shared_samples:
        return None
    return (
        f"another process used {gpu}: {max(counts)} processes in {shared_samples} of"
        f" {len(counts)} samples"
    )


def judge(outcome: Outcome, reasons: Sequence[str]) -> Outcome:
    """Return the outcome, or ``Contaminated`` if there are reasons to doubt it.

    Crashes and timeouts are kept, whatever else happened.
    """
    if reasons and isinstance(outcome, Measured | OutOfMemory):
        return Contaminated(detail="; ".join(reasons))
    return outcome


def describe_other_users(
    gpu: str, used_bytes: int | Unavailable, holders: Holders
) -> str | None:
    """Describe the use of a GPU before this program uses it.

    Return None if only the driver's reserve is in use.
    """
    has_holders = not isinstance(holders, Unavailable) and bool(holders)
    exceeds_reserve = (
        not isinstance(used_bytes, Unavailable)
        and used_bytes > MAX_UNEXPLAINED_GPU_BYTES
    )
    if not has_holders and not exceeds_reserve:
        return None
    return (
        f"{gpu} is already in use: {_bytes_text(used_bytes)} allocated"
        f" ({_holders_text(holders)})"
    )


def _holders_text(holders: Holders) -> str:
    if isinstance(holders, Unavailable):
        return f"processes cannot be listed: {holders.reason}"
    if not holders:
        return "no visible process, perhaps another user's"
    return ", ".join(
        f"pid {process.pid}: {format_bytes(process.used_bytes)}" for process in holders
    )


def _bytes_text(used_bytes: int | Unavailable) -> str:
    return format_bytes(None if isinstance(used_bytes, Unavailable) else used_bytes)


def window_gpu_use(series: GpuSeries) -> GpuUseFigures:
    """Return the figures of one GPU's activity over a window of time."""
    samples = series.samples
    counters = series.gpm
    is_capped = [
        "sw_power_cap" in sample.throttle_reasons
        for sample in samples
        if sample.throttle_reasons is not None
    ]
    gpm_shares = {
        name: _mean_share(getattr(window, field) for window in counters)
        for name, field in _GPM_SHARES.items()
    }
    return GpuUseFigures(
        samples=len(samples),
        utilisation_share=_mean_share(sample.utilisation for sample in samples),
        power_w=mean_power_w(samples),
        used_bytes=combine_known(max, (sample.used_bytes for sample in samples)),
        sm_clock_mhz=combine_known(
            statistics.median, (sample.sm_clock_mhz for sample in samples)
        ),
        temperature_c=combine_known(max, (sample.temperature_c for sample in samples)),
        power_capped_share=combine_known(statistics.fmean, is_capped),
        lacking=_why_no_utilisation(series),
        gpm_windows=len(counters),
        **gpm_shares,
        gpm_pcie_rx_bytes_per_s=combine_known(
            statistics.fmean, (window.pcie_rx_bytes_per_s for window in counters)
        ),
        gpm_lacking=_why_no_counters(series),
    )


def _why_no_utilisation(series: GpuSeries) -> str | None:
    """Return why no sample has the GPU's utilisation; None if one has."""
    samples = series.samples
    if _mean_share(sample.utilisation for sample in samples) is not None:
        return None
    if samples and "utilisation" in samples[-1].missing:
        return samples[-1].missing["utilisation"]
    return series.lacking or "no sample fell into the window"


def _why_no_counters(series: GpuSeries) -> str | None:
    """Return why the window has no hardware counters; None if it has some."""
    if series.gpm:
        return None
    return series.gpm_lacking or "no counter interval fell into the window"


def mean_power_w(samples: Sequence[GpuSample]) -> float | None:
    """Return the mean power between the first sample and the last, in watts.

    If the GPU counts energy, the power follows from that: since Hopper, a sample of
    power is a mean over the last second, part of which lies before the window. Return
    None if the GPU reports neither.
    """
    energies_j = [
        (sample.time_s, sample.energy_j)
        for sample in samples
        if sample.energy_j is not None
    ]
    if energies_j:
        start_s, start_j = energies_j[0]
        end_s, end_j = energies_j[-1]
        if end_s > start_s and end_j > start_j:
            return (end_j - start_j) / (end_s - start_s)
    return combine_known(statistics.fmean, (sample.power_w for sample in samples))


def with_gpu_activity(outcome: Outcome, series: Iterable[GpuSeries]) -> Outcome:
    """Add the activity of each GPU to the figures of a timed window.

    Each GPU gets the figures of its window and, under ``series``, the samples
    themselves, by column. Outcomes without a window are returned as they are.
    """
    if not isinstance(outcome, Measured) or "window_start_s" not in outcome.figures:
        return outcome
    gpus = []
    for gpu_series in series:
        window = gpu_series.between(
            outcome.figures["window_start_s"], outcome.figures["window_end_s"]
        )
        use = window_gpu_use(window).model_dump()
        gpus.append(use | {"series": _columns(window.samples)})
    return Measured(figures=outcome.figures | {"gpus": gpus})


def _columns(samples: Sequence[GpuSample]) -> dict[str, list[Any]]:
    """Return the values of each field over all samples."""
    if not samples:
        return {}
    records = [asdict(sample) for sample in samples]
    return {name: [record[name] for record in records] for name in records[0]}


def _mean_share(values: Iterable[float | None]) -> float | None:
    """Return the mean within 0 and 1.

    Counters that are read at slightly different times exceed 1 by a little.
    """
    mean = combine_known(statistics.fmean, values)
    return None if mean is None else min(1.0, max(0.0, mean))


def combine_known(
    combine: Callable[[list[Known]], Combined], values: Iterable[Known | None]
) -> Combined | None:
    """Combine the finite values; return None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return combine(known) if known else None
