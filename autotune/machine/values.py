"""Facts about a machine.

Unknown figures are ``None``, or ``Unavailable`` with the reason.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from autotune.cluster.slurm_facts import SlurmFacts


def is_pretended(driver: str | None) -> bool:
    """Return True if this driver is simulated.

    Its kernels do nothing, so memory figures are real, but no rate is.
    """
    return driver is not None and driver.endswith("(nullgpu)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """A figure that could not be read, with the reason."""

    reason: str


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
    collective shows 1. ``used_bytes`` includes the driver's reserve. ``power_w`` is,
    since Hopper, the mean of the last second; ``energy_j`` counts from the loading of
    the driver. ``process_count`` counts processes that hold GPU memory to compute;
    those of other containers may be hidden.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU, its present state, and its compute processes."""

    facts: GpuFacts
    sample: GpuSample | Unavailable
    processes: tuple[GpuProcess, ...] | Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The file system under a path; ``path`` is as the caller wrote it."""

    path: str
    filesystem_type: str | None
    free_bytes: int | None
    is_network: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NicFacts:
    """One network interface; virtual ones often report no speed."""

    name: str
    speed_bits_per_s: int | None
    is_up: bool
    is_loopback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """CPUs, memory, disks and network of one host, as this process may use them.

    ``cpus_quota`` is CPU time per wall time that control groups allow, ``cpus_slurm``
    the CPUs that SLURM gave this task. ``ram_available_bytes`` is the memory still
    available, by the system's count or by the tightest control group, whichever is
    less; ``ram_limit_source`` names it and ``ram_limit_bytes`` is that group's limit,
    if it was a group.
    """

    cpus_online: int
    cpus_affinity: int
    cpus_quota: float | None
    cpus_slurm: int | None
    ram_total_bytes: int
    ram_available_bytes: int
    ram_limit_source: str
    ram_limit_bytes: int | None
    shm_free_bytes: int | None
    cpu_model: str | None
    platform: str
    python_version: str
    load_average_1min: float | None
    disks: tuple[DiskFacts, ...]
    nics: tuple[NicFacts, ...]

    @property
    def allotted_cpus(self) -> int:
        """CPU cores available to this process.

        It is the smallest of the known limits, at least 1.
        """
        # Rounded down, as half a core cannot run a worker at full speed.
        quota = None if self.cpus_quota is None else math.floor(self.cpus_quota)
        limits = (self.cpus_online, self.cpus_affinity, quota, self.cpus_slurm)
        return max(1, min(limit for limit in limits if limit is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All facts that ``autotune doctor`` reads.

    ``gpu_absent`` is the reason if there is no GPU; ``gpu_unreadable`` names GPUs that
    exist but could not be described. ``versions`` holds the installed libraries only.
    """

    time_utc: datetime
    host: HostFacts
    gpus: tuple[GpuStatus, ...]
    gpu_absent: str | None
    gpu_unreadable: tuple[str, ...]
    slurm: SlurmFacts
    versions: Mapping[str, str]
    conflicting_distributions: tuple[str, ...] = ()
    """Names of other installed distributions with a package of this tool's names."""


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
FAULTS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
"""Throttle reasons that spoil a measurement; the others, such as the software power cap
of a loaded GPU, are normal. The power brake is an external signal that at least halves
the clocks and raises hw_slowdown."""


def throttle_names(mask: int) -> tuple[str, ...]:
    """Return the names of the bits in NVML's throttle mask, lowest first.

    A bit not in the table keeps its number.
    """
    bits = (
        1 << position for position in range(mask.bit_length()) if mask >> position & 1
    )
    return tuple(THROTTLE_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits)


def throttle_faults(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the throttle reasons that make a measurement worthless.

    They are heat and hardware slowdown.
    """
    return tuple(name for name in names or () if name in FAULTS)


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


_NETWORK_FILESYSTEMS = (
    "9p afs beegfs ceph cifs coda daos dfuse fhgfs gcsfuse glusterfs goofys gpfs"
    " juicefs lustre mfs mount_s3 ncpfs nfs nfs4 orangefs panfs pvfs2 rclone s3fs"
    " seaweedfs smb3 smbfs sshfs wekafs"
)


def is_network_filesystem(filesystem_type: str | None) -> bool:
    """Return True if files on this type of file system are on another machine."""
    return (filesystem_type or "").lower().removeprefix(
        "fuse."
    ) in _NETWORK_FILESYSTEMS.split()
