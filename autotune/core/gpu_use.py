"""What one GPU did in a window of time, as figures. A figure that cannot be had is None, with the reason; never 0."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUseFigures:
    """One GPU over a window; shares are 0 to 1, and means unless they say otherwise."""

    samples: int = 0
    utilisation_share: float | None = None
    used_bytes: int | None = None
    """Largest."""
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    """Median."""
    temperature_c: int | None = None
    """Highest."""
    power_capped_share: float | None = None
    """Samples at the power cap: how a loaded card operates, not a fault."""
    lacking: str | None = None
    """Why there is no utilisation."""
    gpm_windows: int = 0
    gpm_sm_share: float | None = None
    gpm_occupancy_share: float | None = None
    gpm_tensor_share: float | None = None
    gpm_dram_share: float | None = None
    gpm_pcie_rx_bytes_per_s: float | None = None
    gpm_lacking: str | None = None
