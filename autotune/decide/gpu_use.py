"""What GPUs did in a window of time, as figures; each is missing on its own, with the reason. Pure."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from autotune.core.hardware import GpuSample, GpuSeries
from autotune.core.outcome import Measured, Outcome
from autotune.core.trial import GpuUseFigures

POWER_CAP = "sw_power_cap"
NO_SAMPLE = "no sample fell into the window"
NO_COUNTERS = "no window of counters lay in it"
_GPM_SHARES = {
    "gpm_sm_share": "sm_utilisation",
    "gpm_occupancy_share": "sm_occupancy",
    "gpm_tensor_share": "tensor_active",
    "gpm_dram_share": "dram_active",
}


def gpu_use(series: GpuSeries) -> GpuUseFigures:
    """The figures of a series."""
    samples, counted = series.samples, series.gpm
    utilisation = _share(one.utilisation for one in samples)
    lacking = series.lacking or NO_SAMPLE
    if samples:
        lacking = samples[-1].missing.get("utilisation", lacking)
    capped = [POWER_CAP in one.throttle_reasons for one in samples if one.throttle_reasons is not None]
    return GpuUseFigures(
        samples=len(samples),
        utilisation_share=utilisation,
        used_bytes=_over(max, (one.used_bytes for one in samples)),
        power_w=mean_power_w(samples),
        sm_clock_mhz=_over(statistics.median, (one.sm_clock_mhz for one in samples)),
        temperature_c=_over(max, (one.temperature_c for one in samples)),
        power_capped_share=_over(statistics.fmean, capped),
        lacking=lacking if utilisation is None else None,
        gpm_windows=len(counted),
        **{name: _share(getattr(one, field) for one in counted) for name, field in _GPM_SHARES.items()},
        gpm_pcie_rx_bytes_per_s=_over(statistics.fmean, (one.pcie_rx_bytes_per_s for one in counted)),
        gpm_lacking=None if counted else series.gpm_lacking or NO_COUNTERS,
    )


def mean_power_w(samples: Sequence[GpuSample]) -> float | None:
    """Return the mean power between the first sample and the last; None if nothing tells.

    From the energy in between where the GPU counts it: since Hopper, a reading of power is a mean over the last second,
    of which a part lies before the window.
    """
    counted = [(one.time_s, one.energy_j) for one in samples if one.energy_j is not None]
    if counted:
        (start_s, before_j), (end_s, after_j) = counted[0], counted[-1]
        if end_s > start_s and after_j > before_j:
            return (after_j - before_j) / (end_s - start_s)
    mean: float | None = _over(statistics.fmean, (one.power_w for one in samples))
    return mean


def with_gpus(outcome: Outcome, series: Iterable[GpuSeries]) -> Outcome:
    """Figures of a window of time with what each GPU did in it: as figures and as the series itself."""
    if not isinstance(outcome, Measured) or "window_start_s" not in outcome.figures:
        return outcome
    gpus = []
    for one in series:
        inside = one.between(outcome.figures["window_start_s"], outcome.figures["window_end_s"])
        rows = [asdict(sample) for sample in inside.samples]
        columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
        gpus.append(gpu_use(inside).model_dump() | {"series": columns})
    return Measured(figures=outcome.figures | {"gpus": gpus})


def _share(values: Iterable[float | None]) -> float | None:
    """The mean; counters that are differenced over slightly other times than they were read at exceed 1 by a little."""
    mean: float | None = _over(statistics.fmean, values)
    return None if mean is None else min(1.0, max(0.0, mean))


def _over(combine: Callable[[list[Any]], Any], values: Iterable[Any]) -> Any:  # noqa: ANN401 - of whatever kind they are
    """Combine the values that are there; None where none is."""
    there = [value for value in values if value is not None]
    return combine(there) if there else None
