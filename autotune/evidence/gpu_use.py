"""Activity of GPUs in timed windows."""

from typing import Annotated

from pydantic import Field

from trainer.formats.tables import StrictTable

Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, 0 to 1."""


class GpuUse(StrictTable):
    """Activity of GPUs in one or several windows of training.

    Figures are means over GPUs and windows; shares are from 0 to 1. A figure that the
    GPUs do not report is None.
    """

    utilisation_share: Share | None = None
    """Share of the time with a kernel running, by NVML; this is not MFU."""
    power_w: float | None = None
    """Power of a GPU, in watts."""
    sm_clock_mhz: float | None = None
    """Median SM clock of a window's samples."""
    power_capped_share: Share | None = None
    """Share of samples at the power cap, which is normal for a loaded GPU and not a
    fault."""
    gpm_sm_share: Share | None = None
    """Share of the time, averaged over SMs, in which a warp was resident. All fields
    ``gpm_…`` are from GPM, the GPU's hardware counters."""
    gpm_occupancy_share: Share | None = None
    """Resident warps as a share of the most that fit."""
    gpm_tensor_share: Share | None = None
    """Share of the time in which Tensor Cores worked."""
    gpm_dram_share: Share | None = None
    """Share of the memory bandwidth in use."""
    gpm_pcie_rx_bytes_per_s: float | None = None
    """PCIe traffic from the host to the GPU."""
