"""GPUs of this machine, as NVML reports them.

An unknown figure is ``None``, or ``Unavailable`` with the reason.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """A figure that could not be read, with the reason."""

    reason: str
    for_now: bool = False
    """True if it is only too early, so that a later reading may have the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Facts about one GPU from its driver.

    ``index`` is NVML's, which follows the PCI bus; CUDA may number the same GPUs
    differently, but UUIDs agree. ``total_bytes`` is NVML's total, a little more than a
    CUDA process can use. ``power_cap_w`` is the enforced limit. ``mig_uuids`` are the
    UUIDs of the GPU's MIG slices, if it has any.
    """

    uuid: str
    index: int
    name: str
    total_bytes: int
    mig_enabled: bool | None
    power_cap_w: float | None
    compute_mode: str | None
    driver: str
    compute_capability: tuple[int, int] | None
    mig_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """State of one GPU at one moment.

    ``time_s`` is on CLOCK_MONOTONIC. ``utilisation`` is the share (0 to 1) of the
    driver's last window in which at least one kernel ran: a rank that waits in a
    collective shows 1. ``memory_utilisation`` is the share of that window in which
    device memory was read or written. ``used_bytes`` includes the driver's reserve.
    ``power_w`` is, since Hopper, the mean of the last second; ``energy_j`` counts from
    the loading of the driver. ``process_count`` counts processes that hold GPU memory
    to compute; those of other containers may be hidden.
    """

    time_s: float
    utilisation: float | None
    used_bytes: int | None
    power_w: float | None
    sm_clock_mhz: int | None
    throttle_reasons: tuple[str, ...] | None
    temperature_c: int | None
    process_count: int | None = None
    energy_j: float | None = None
    memory_utilisation: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """Reason for each missing figure, by the figure's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpmWindow:
    """Hardware counters of one GPU between two moments (CLOCK_MONOTONIC).

    Shares are 0 to 1.

    ``sm_utilisation``: busy SMs. ``sm_occupancy``: resident warps of the possible ones.
    ``tensor_active``: time in which the SMs did any tensor operation. ``dram_active``:
    memory bandwidth of the theoretical maximum.
    """

    start_s: float
    end_s: float
    sm_utilisation: float | None
    sm_occupancy: float | None
    tensor_active: float | None
    dram_active: float | None
    pcie_rx_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeries:
    """Samples and counter windows of one GPU in order of time.

    ``lacking`` and ``gpm_lacking``: why there are none.
    """

    samples: tuple[GpuSample, ...] = ()
    gpm: tuple[GpmWindow, ...] = ()
    lacking: str | None = None
    gpm_lacking: str | None = None

    def between(self, start_s: float, end_s: float) -> "GpuSeries":
        """Return the part between two moments of CLOCK_MONOTONIC, both included."""
        samples = tuple(one for one in self.samples if start_s <= one.time_s <= end_s)
        gpm = tuple(
            one for one in self.gpm if start_s <= one.start_s and one.end_s <= end_s
        )
        return replace(self, samples=samples, gpm=gpm)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process with a compute context on a GPU.

    Inside a container ``pid`` is still the host's.
    """

    pid: int
    used_bytes: int | None


THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Reasons for a GPU to run below its top clock, by bit: NVML API reference,
nvmlClocksEventReasons."""


def throttle_names(mask: int) -> tuple[str, ...]:
    """Return the names of the bits in NVML's throttle mask, lowest first.

    A bit not in the table keeps its number.
    """
    bits = (
        1 << position for position in range(mask.bit_length()) if mask >> position & 1
    )
    return tuple(THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits)


def visible_devices(
    devices: Sequence[GpuFacts], environment: Mapping[str, str]
) -> tuple[GpuFacts, ...]:
    """Return the GPUs that a CUDA process would see, in its order.

    ``CUDA_VISIBLE_DEVICES`` has indices, or prefixes of the UUID of a GPU or MIG slice.
    As in CUDA, an entry that matches nothing ends the list, and a repeated one empties
    it. Indices are read in PCI order, which CUDA shares unless the user has set another
    ``CUDA_DEVICE_ORDER`` and GPUs differ.
    """
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(devices)
    entries = [part.strip() for part in text.split(",")]
    named = [_devices_named(devices, entry) for entry in entries]
    found = list(itertools.takewhile(lambda those: len(those) == 1, named))
    if len(set(entries[: len(found)])) < len(found):
        return ()
    # Two slices of one GPU are one GPU.
    return tuple(dict.fromkeys(one for (one,) in found))


def _devices_named(devices: Sequence[GpuFacts], entry: str) -> list[GpuFacts]:
    if entry.isascii() and entry.isdecimal():
        return [device for device in devices if device.index == int(entry)]
    if entry.startswith(("GPU-", "MIG-GPU-")):
        # Drivers before 470 named a slice by its GPU:
        # MIG-GPU-<uuid>/<instance>/<compute instance>.
        prefix = entry.removeprefix("MIG-").split("/")[0]
        return [device for device in devices if device.uuid.startswith(prefix)]
    sliced = devices if entry.startswith("MIG-") else ()
    return [
        device
        for device in sliced
        if any(uuid.startswith(entry) for uuid in device.mig_uuids)
    ]
