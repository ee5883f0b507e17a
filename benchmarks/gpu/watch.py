"""Watch a GPU from outside while a child loads it: NVML samples, and hardware counters in windows end to end."""

import statistics
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from autotune.core.hardware import GpmWindow, GpuSample, Unavailable, window
from autotune.measure.gpu_sampler import GpuSampler
from autotune.measure.nvml import GpuMonitor
from benchmarks.gpu.results import Sheet

GPM_FIELDS = ("sm_utilisation", "sm_occupancy", "tensor_active", "dram_active")


class Watch:
    """Samples one GPU from ``with`` to the block's end; afterwards any stretch of that time can be read.

    Args:
        monitor: Where the readings come from.
        uuid: The GPU; None where there is none.
        absent: Why there is none.
        gpm_window_s: Length of one window of counters.
    """

    def __init__(self, monitor: GpuMonitor, uuid: str | None, absent: str, *, gpm_window_s: float) -> None:
        self._monitor = monitor
        self._uuid = uuid
        self._absent = absent
        self._gpm_window_s = gpm_window_s
        self._sampler = GpuSampler(monitor, [] if uuid is None else [uuid])
        self._samples: tuple[GpuSample, ...] = ()
        self._windows: list[GpmWindow] = []
        self._gpm_reason: str | None = None
        self._finish = threading.Event()
        # A driver's call may never return; this process must be able to end even then.
        self._thread = threading.Thread(target=self._count, name="gpm-windows", daemon=True)

    def __enter__(self) -> Self:
        if self._uuid is not None:
            self._sampler.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish.set()
        if self._uuid is not None:
            self._samples = self._sampler.stop()[self._uuid]
            self._thread.join()

    def samples(self, start_s: float, end_s: float) -> tuple[GpuSample, ...] | Unavailable:
        """NVML's samples between two moments of CLOCK_MONOTONIC."""
        if self._uuid is None:
            return Unavailable(reason=self._absent)
        found = window(self._samples, start_s, end_s)
        return found or Unavailable(reason=self._sampler.reasons().get(self._uuid, "no sample fell into the window"))

    def windows(self, start_s: float, end_s: float) -> tuple[GpmWindow, ...] | Unavailable:
        """The windows of counters that lie wholly between two moments."""
        if self._uuid is None:
            return Unavailable(reason=self._absent)
        found = tuple(one for one in self._windows if start_s <= one.start_s and one.end_s <= end_s)
        return found or Unavailable(reason=self._gpm_reason or "no window of counters lay in the measured time")

    def _count(self) -> None:
        assert self._uuid is not None
        probe = self._monitor.gpm_window(self._uuid)
        while not self._finish.is_set():
            probe.start()
            self._finish.wait(self._gpm_window_s)
            found = probe.stop()
            if isinstance(found, GpmWindow):
                self._windows.append(found)
            elif self._gpm_reason is None:
                self._gpm_reason = found.reason


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
    sheet.measured(f"{prefix}_nvml_power_w", _over(mean, (one.power_w for one in series)), lacking=lacking)
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
