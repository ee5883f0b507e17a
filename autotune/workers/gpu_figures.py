"""Figures of the GPUs in the windows of a sweep, and their sources."""

import statistics
from collections.abc import Iterable, Sequence

from autotune.base.units import format_percent
from autotune.evidence.gpu_use import GpuUse
from autotune.machine.measured_device import MeasuredDevice
from autotune.trials.job_figures import GpuUseFigures, WindowFigures
from trainer.formats.gpu_activity import combine_known


def mean_gpu_use(windows: Sequence[WindowFigures]) -> GpuUse | None:
    """Return means over windows and GPUs; None without a GPU.

    Each mean leaves out the GPUs without that figure.
    """
    gpus = _gpus_of(windows)
    if not gpus:
        return None
    return GpuUse(
        utilisation_share=_mean(gpu.utilisation_share for gpu in gpus),
        power_w=_mean(gpu.power_w for gpu in gpus),
        sm_clock_mhz=_mean(gpu.sm_clock_mhz for gpu in gpus),
        power_capped_share=_mean(gpu.power_capped_share for gpu in gpus),
        gpm_sm_share=_mean(gpu.gpm_sm_share for gpu in gpus),
        gpm_occupancy_share=_mean(gpu.gpm_occupancy_share for gpu in gpus),
        gpm_tensor_share=_mean(gpu.gpm_tensor_share for gpu in gpus),
        gpm_dram_share=_mean(gpu.gpm_dram_share for gpu in gpus),
        gpm_pcie_rx_bytes_per_s=_mean(gpu.gpm_pcie_rx_bytes_per_s for gpu in gpus),
    )


def _gpus_of(windows: Sequence[WindowFigures]) -> list[GpuUseFigures]:
    """Return the figures of every GPU in every window."""
    return [gpu for window in windows for gpu in window.gpus]


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    return combine_known(statistics.fmean, values)


def operating_state(windows: Sequence[WindowFigures]) -> str | None:
    """Return power, clock and power cap of the GPUs in windows, in words.

    Returns:
        None without a GPU, or if its power is unknown.
    """
    use = mean_gpu_use(windows)
    if use is None or use.power_w is None:
        return None
    parts = [f"{use.power_w:,.0f} W"]
    if use.sm_clock_mhz is not None:
        parts.append(f"SM clock {use.sm_clock_mhz:,.0f} MHz")
    if use.power_capped_share is not None:
        parts.append(
            f"at the power cap in {format_percent(use.power_capped_share)} of samples"
        )
    return ", ".join(parts)


def gpu_source(
    site: MeasuredDevice, windows: Sequence[WindowFigures], *, replayed: bool = False
) -> str:
    """Return the source of each kind of GPU figure, in words.

    Args:
        site: The measured machine.
        windows: Windows with the figures of their GPUs.
        replayed: True if no training step ran.
    """
    if replayed:
        return "n/a (simulated step)"
    if site.gpu is None:
        reason = "" if site.gpu_absent is None else f": {site.gpu_absent}"
        return f"n/a (CPU run{reason})"
    gpus = _gpus_of(windows)
    return f"{site.gpu.name}; {_nvml_source(gpus)}; {_gpm_source(gpus)}"


def _nvml_source(gpus: Sequence[GpuUseFigures]) -> str:
    """Name NVML as the source of utilisation, or give the first reason against it."""
    if any(gpu.utilisation_share is not None for gpu in gpus):
        return "NVML utilisation"
    reasons = (gpu.lacking for gpu in gpus if gpu.lacking)
    return f"NVML utilisation: n/a ({next(reasons, 'no samples')})"


def _gpm_source(gpus: Sequence[GpuUseFigures]) -> str:
    """Name GPM as the source of counters, or give the first reason against it."""
    if any(gpu.gpm_windows for gpu in gpus):
        return "GPM counters during the timed windows"
    reasons = (gpu.gpm_lacking for gpu in gpus if gpu.gpm_lacking)
    return f"GPM: n/a ({next(reasons, 'no counters')})"
