"""Activity of GPUs in a window of time, as figures, and the rules by which a trial's outcome is discarded. Pure.

Process ids do not identify the owner of memory, as a container sees other ids than the
host. So bytes are compared with a baseline from before this program used a GPU; listed
processes are only a hint.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TypeVar

from autotune.base.units import format_bytes, format_seconds
from autotune.machine.decide import MAX_UNEXPLAINED_GPU_BYTES
from autotune.machine.values import (
    GpuProcess,
    GpuSample,
    GpuSeries,
    Unavailable,
    throttle_faults,
)
from autotune.trials.values import (
    Contaminated,
    GpuUseFigures,
    Measured,
    Outcome,
    OutOfMemory,
)

Known = TypeVar("Known", bound=float)
Combined = TypeVar("Combined")
MEMORY_TOLERANCE_BYTES = 64 * 2**20
"""Tolerated change of an idle GPU's used memory: the driver's own changes are MiB, a
CUDA context takes hundreds."""

_GPM_SHARES = {
    "gpm_sm_share": "sm_utilisation",
    "gpm_occupancy_share": "sm_occupancy",
    "gpm_tensor_share": "tensor_active",
    "gpm_dram_share": "dram_active",
}

Holders = tuple[GpuProcess, ...] | Unavailable
"""Processes that the driver lists on a GPU."""


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
    """Describe the memory of a GPU that was not freed: its size, and the processes that hold it."""
    before = f"{_shown(baseline_bytes)} before the first trial ({_named(holders)})"
    return (
        f"{gpu} still holds {_shown(used_bytes)} after a wait of"
        f" {format_seconds(waited_s)}, up from {before}"
    )


def describe_slowdown(gpu: str, samples: Sequence[GpuSample]) -> str | None:
    """Name the faults (heat, hardware slowdown.

    No power cap) that lowered a GPU's clocks for long, else None.
    """
    readings = [
        sample.throttle_reasons
        for sample in samples
        if sample.throttle_reasons is not None
    ]
    slowed = [found for reasons in readings if (found := throttle_faults(reasons))]
    # Intact air-cooled GPUs slow down for a moment now and then; a slowdown in every
    # sample is a fault.
    if not slowed or (
        len(slowed) < len(readings) and len(slowed) <= max(1, 0.1 * len(readings))
    ):
        return None
    faults = Counter(fault for found in slowed for fault in found)
    shares = ", ".join(
        f"{name} in {count} of {len(readings)} samples"
        for name, count in faults.items()
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
    shared = sum(count > 1 for count in counts)
    told = (
        f"another process used {gpu}: {max(counts, default=0)} processes in {shared} of"
        f" {len(counts)} samples"
    )
    return told if shared else None


def judge(outcome: Outcome, reasons: Sequence[str]) -> Outcome:
    """Return the outcome.

    ``Contaminated`` if there are reasons to doubt its figures. Keep crashes and
    timeouts.
    """
    doubtful = reasons and isinstance(outcome, Measured | OutOfMemory)
    return Contaminated(detail="; ".join(reasons)) if doubtful else outcome


def describe_other_users(
    gpu: str, used_bytes: int | Unavailable, holders: Holders
) -> str | None:
    """Describe the use of a GPU before this program uses it.

    Return None if only the driver's reserve is in use.
    """
    listed = not isinstance(holders, Unavailable) and bool(holders)
    taken = (
        not isinstance(used_bytes, Unavailable)
        and used_bytes > MAX_UNEXPLAINED_GPU_BYTES
    )
    told = (
        f"{gpu} is already in use: {_shown(used_bytes)} allocated ({_named(holders)})"
    )
    return told if listed or taken else None


def _named(holders: Holders) -> str:
    if isinstance(holders, Unavailable):
        return f"processes cannot be listed: {holders.reason}"
    named = ", ".join(
        f"pid {process.pid}: {format_bytes(process.used_bytes)}" for process in holders
    )
    return named or "no visible process, perhaps another user's"


def _shown(used_bytes: int | Unavailable) -> str:
    return format_bytes(None if isinstance(used_bytes, Unavailable) else used_bytes)


def gpu_use(series: GpuSeries) -> GpuUseFigures:
    """Return the figures of a series."""
    samples, counted = series.samples, series.gpm
    utilisation = _share(one.utilisation for one in samples)
    missing = samples[-1].missing if samples else {}
    lacking = missing.get(
        "utilisation", series.lacking or "no sample fell into the window"
    )
    capped = [
        "sw_power_cap" in one.throttle_reasons
        for one in samples
        if one.throttle_reasons is not None
    ]
    return GpuUseFigures(
        samples=len(samples),
        utilisation_share=utilisation,
        power_w=mean_power_w(samples),
        used_bytes=of_known(max, (one.used_bytes for one in samples)),
        sm_clock_mhz=of_known(statistics.median, (one.sm_clock_mhz for one in samples)),
        temperature_c=of_known(max, (one.temperature_c for one in samples)),
        power_capped_share=of_known(statistics.fmean, capped),
        lacking=lacking if utilisation is None else None,
        gpm_windows=len(counted),
        **{
            name: _share(getattr(one, field) for one in counted)
            for name, field in _GPM_SHARES.items()
        },
        gpm_pcie_rx_bytes_per_s=of_known(
            statistics.fmean, (one.pcie_rx_bytes_per_s for one in counted)
        ),
        gpm_lacking=(
            None
            if counted
            else series.gpm_lacking or "no counter interval fell into the window"
        ),
    )


def mean_power_w(samples: Sequence[GpuSample]) -> float | None:
    """Return the mean power between the first sample and the last, in watts.

    None if the GPU reports none.

    If the GPU counts energy, the power follows from that: since Hopper, a sample of
    power is a mean over the last second, part of which lies before the window.
    """
    counted = [
        (one.time_s, one.energy_j) for one in samples if one.energy_j is not None
    ]
    if counted:
        (start_s, before_j), (end_s, after_j) = counted[0], counted[-1]
        if end_s > start_s and after_j > before_j:
            return (after_j - before_j) / (end_s - start_s)
    return of_known(statistics.fmean, (one.power_w for one in samples))


def with_gpus(outcome: Outcome, series: Iterable[GpuSeries]) -> Outcome:
    """Add the activity of each GPU to the figures of a window of time: as figures and as the series itself."""
    if not isinstance(outcome, Measured) or "window_start_s" not in outcome.figures:
        return outcome
    gpus = []
    for one in series:
        inside = one.between(
            outcome.figures["window_start_s"], outcome.figures["window_end_s"]
        )
        rows = [asdict(sample) for sample in inside.samples]
        columns = {
            name: [row[name] for row in rows] for name in (rows[0] if rows else ())
        }
        gpus.append(gpu_use(inside).model_dump() | {"series": columns})
    return Measured(figures=outcome.figures | {"gpus": gpus})


def _share(values: Iterable[float | None]) -> float | None:
    """Return the mean within 0 and 1: counters that are read at slightly different times exceed 1 by a little."""
    mean = of_known(statistics.fmean, values)
    return None if mean is None else min(1.0, max(0.0, mean))


def of_known(
    combine: Callable[[list[Known]], Combined], values: Iterable[Known | None]
) -> Combined | None:
    """Combine the finite values; return None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return combine(known) if known else None
