"""GPU performance monitoring (GPM) through NVML: hardware counters between two moments, on Hopper and later."""

import math
from collections.abc import Callable
from typing import Any

from autotune.core.hardware import GpmWindow, Unavailable
from autotune.measure.clock import Clock

MIN_INTERVAL_S = 0.1
"""NVML refreshes its counters about this often; sampling or differencing them faster reads noise."""

NOT_STARTED = "the window was not started"

Ask = Callable[[Callable[[Any, Any], Any]], Any]

# The field that a metric fills, NVML's name for the metric, and the factor from NVML's unit (percent, MiB/s) to ours.
_GPM_METRICS = (
    ("sm_utilisation", "NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("sm_occupancy", "NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("tensor_active", "NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("dram_active", "NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("pcie_rx_bytes_per_s", "NVML_GPM_METRIC_PCIE_RX_PER_SEC", float(2**20)),
)


class NvmlGpmProbe:
    """One window of counters on one GPU.

    Args:
        ask: Puts a question (of the bindings and a device handle) to this GPU under its lock, and translates its error.
        clock: Where the window's times come from.
    """

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._start_s = 0.0
        self._first: Any = Unavailable(reason=NOT_STARTED)

    def start(self) -> None:
        """Take the first sample; a failure is kept for ``stop``."""
        self._release()
        self._first = self._ask(_take_supported_gpm_sample)
        self._start_s = self._clock.monotonic_s()

    def stop(self) -> GpmWindow | Unavailable:
        """Take the second sample and compare; a metric the driver does not give is missing on its own."""
        try:
            return self._measure()
        finally:
            self._release()

    def _measure(self) -> GpmWindow | Unavailable:
        if isinstance(self._first, Unavailable):
            return self._first
        end_s = self._clock.monotonic_s()
        if end_s - self._start_s < MIN_INTERVAL_S:
            return Unavailable(reason=f"a window of {end_s - self._start_s:.3f} s is shorter than {MIN_INTERVAL_S} s")
        metrics = self._ask(lambda nvml, gpu: _gpm_metrics(nvml, gpu, self._first))
        if isinstance(metrics, Unavailable):
            return metrics
        return GpmWindow(start_s=self._start_s, end_s=end_s, **metrics)

    def _release(self) -> None:
        """Give the first sample back; after the monitor is closed NVML has freed it already."""
        first, self._first = self._first, Unavailable(reason=NOT_STARTED)
        if not isinstance(first, Unavailable):
            self._ask(lambda nvml, _: nvml.nvmlGpmSampleFree(first))


def _take_supported_gpm_sample(nvml: Any, gpu: Any) -> Any:  # noqa: ANN401 - untyped bindings, opaque handles
    if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
        return Unavailable(reason="this GPU has no performance monitoring (GPM needs Hopper or later)")
    return _take_gpm_sample(nvml, gpu)


def _take_gpm_sample(nvml: Any, gpu: Any) -> Any:  # noqa: ANN401 - untyped bindings, opaque handles
    sample = nvml.nvmlGpmSampleAlloc()
    try:
        nvml.nvmlGpmSampleGet(gpu, sample)
    except nvml.NVMLError:
        nvml.nvmlGpmSampleFree(sample)
        raise
    return sample


def _gpm_metrics(nvml: Any, gpu: Any, first: Any) -> dict[str, float | None]:  # noqa: ANN401 - untyped bindings
    second = _take_gpm_sample(nvml, gpu)
    try:
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_GPM_METRICS)
        request.sample1, request.sample2 = first, second
        for slot, (_, metric, _) in enumerate(_GPM_METRICS):
            request.metrics[slot].metricId = getattr(nvml, metric)
        answers = nvml.nvmlGpmMetricsGet(request).metrics
        return {
            field: answers[slot].value * factor
            if answers[slot].nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(answers[slot].value)
            else None
            for slot, (field, _, factor) in enumerate(_GPM_METRICS)
        }
    finally:
        nvml.nvmlGpmSampleFree(second)
