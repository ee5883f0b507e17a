"""Watch a GPU from outside while a child loads it: NVML samples, and hardware counters in windows end to end."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from autotune.core.hardware import GpmWindow, GpuSample, GpuSeries, Unavailable
from autotune.decide.gpu_use import NO_COUNTERS, NO_SAMPLE, mean_power_w
from autotune.measure.gpu_sampler import Sampler
from benchmarks.gpu.check.results import Sheet

GPM_FIELDS = ("sm_utilisation", "sm_occupancy", "tensor_active", "dram_active")


class Watch:
    """Samples one GPU from ``with`` to the block's end; afterwards any stretch of that time can be read.

    Args:
        sampler: Samples the GPU.
        uuid: The GPU; None where there is none.
        absent: Why there is none.
    """

    def __init__(self, sampler: Sampler, uuid: str | None, absent: str) -> None:
        self._sampler = sampler
        self._uuid = uuid
        self._absent = absent
        self._series = GpuSeries()

    def __enter__(self) -> Self:
        if self._uuid is not None:
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._uuid is not None:
            self._series = self._sampler.take()[self._uuid]
            self._sampler.stop()

    def samples(self, start_s: float, end_s: float) -> tuple[GpuSample, ...] | Unavailable:
        """NVML's samples between two moments of CLOCK_MONOTONIC."""
        if self._uuid is None:
            return Unavailable(reason=self._absent)
        found = self._series.between(start_s, end_s).samples
        return found or Unavailable(reason=self._series.lacking or NO_SAMPLE)

    def windows(self, start_s: float, end_s: float) -> tuple[GpmWindow, ...] | Unavailable:
        """The windows of counters that lie wholly between two moments."""
        if self._uuid is None:
            return Unavailable(reason=self._absent)
        found = self._series.between(start_s, end_s).gpm
        return found or Unavailable(reason=self._series.gpm_lacking or NO_COUNTERS)


def write_readings(
    sheet: Sheet, prefix: str, watch: Watch, start_s: float, end_s: float, *, busy_share: float | None
) -> None:
    """Write what NVML and GPM said over a stretch of time, each beside the load that is known.

    Args:
        sheet: Where the figures go; the readings themselves go to its details.
        prefix: What the load is called.
        watch: What has watched.
        start_s: Start of the stretch, CLOCK_MONOTONIC.
        end_s: Its end.
        busy_share: How busy the GPU was by its own events; None where that is unknown.
    """
    samples, windows = watch.samples(start_s, end_s), watch.windows(start_s, end_s)
    lacking = samples.reason if isinstance(samples, Unavailable) else ""
    series = () if isinstance(samples, Unavailable) else samples
    mean = statistics.fmean
    sheet.measured(
        f"{prefix}_nvml_utilisation_share",
        _over(mean, (one.utilisation for one in series)),
        expected=busy_share,
        lacking=lacking,
    )
    sheet.measured(f"{prefix}_nvml_power_w", mean_power_w(series), lacking=lacking)
    clocks_mhz = (one.sm_clock_mhz for one in series)
    sheet.measured(f"{prefix}_nvml_sm_clock_mhz", _over(statistics.median, clocks_mhz), lacking=lacking)
    sheet.measured(f"{prefix}_nvml_temperature_c", _over(max, (one.temperature_c for one in series)), lacking=lacking)
    sheet.measured(f"{prefix}_nvml_used_bytes", _over(max, (one.used_bytes for one in series)), lacking=lacking)
    lacking = windows.reason if isinstance(windows, Unavailable) else ""
    counted = () if isinstance(windows, Unavailable) else windows
    for name in GPM_FIELDS:
        # A product's kernel runs on every SM, and nothing but products runs; the other counters have no such truth.
        expected = busy_share if name == "sm_utilisation" else None
        value = _over(mean, (getattr(one, name) for one in counted))
        sheet.measured(f"{prefix}_gpm_{name}_share", value, expected=expected, lacking=lacking)
    pcie = _over(mean, (one.pcie_rx_bytes_per_s for one in counted))
    sheet.measured(f"{prefix}_gpm_pcie_rx_bytes_per_s", pcie, lacking=lacking)
    sheet.details[f"{prefix}_readings"] = _details(series, counted, start_s, end_s)


def _details(
    samples: Iterable[GpuSample], windows: Iterable[GpmWindow], start_s: float, end_s: float
) -> dict[str, Any]:
    series = list(samples)
    throttle = sorted({reason for one in series for reason in one.throttle_reasons or ()})
    return {
        "start_s": start_s,
        "end_s": end_s,
        "throttle_reasons": throttle,
        "nvml_samples": [asdict(one) for one in series],
        "gpm_windows": [asdict(one) for one in windows],
    }


def _over(combine: Callable[[list[Any]], float], values: Iterable[float | None]) -> float | None:
    """Combine the values that are there; None where none is."""
    there = [value for value in values if value is not None]
    return combine(there) if there else None
