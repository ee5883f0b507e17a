"""Facts about a machine.

Unknown figures are ``None``, or ``Unavailable`` with the reason.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from autotune.cluster.slurm_facts import SlurmFacts
from trainer.formats.gpus import GpuFacts, GpuProcess, GpuSample, Unavailable

NOTHING_TIMED = (
    "pretended GPU: memory is that of torch's allocator, and nothing was timed"
)
"""Remark on figures of a GPU that takes no time to compute."""
_PRETENDED_DRIVER = "(nullgpu)"
"""End of the version that the simulated driver of this project's tests reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGpu:
    """The GPU of a measurement."""

    name: str | None
    """Name, as its driver reports it; None on a CPU."""
    driver: str | None
    """Version of its driver; None on a CPU, or if it is not known."""

    @property
    def takes_time(self) -> bool:
        """False if the GPU is a pretended one.

        Its kernels do nothing, so that memory figures are real, but no rate is. A CPU
        takes time.
        """
        return self.driver is None or not self.driver.endswith(_PRETENDED_DRIVER)


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
    """CPUs, memory, disks and network of one host, as this process may use them."""

    cpus_online: int
    cpus_affinity: int
    """CPUs that this process may run on."""
    cpus_quota: float | None
    """CPU time per wall time that control groups allow; None for no limit."""
    cpus_slurm: int | None
    """CPUs that SLURM gave this task; None outside a job."""
    ram_total_bytes: int
    ram_available_bytes: int
    """Memory that is still available, by the system's count or by the tightest control
    group, whichever is less."""
    ram_limit_source: str
    """Name of the system or of the kind of group that counts."""
    ram_limit_bytes: int | None
    """Limit of that group; None if the system's count is less."""
    shm_free_bytes: int | None
    """Free memory in ``/dev/shm``."""
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
    """All facts that ``autotune doctor`` reads."""

    time_utc: datetime
    host: HostFacts
    gpus: tuple[GpuStatus, ...]
    gpu_absent: str | None
    """Reason why there is no GPU; None if there is one."""
    gpu_unreadable: tuple[str, ...]
    """GPUs that exist but could not be described, with the reason."""
    slurm: SlurmFacts
    versions: Mapping[str, str]
    """Versions of the installed libraries only."""
    conflicting_distributions: tuple[str, ...] = ()
    """Names of other installed distributions with a package of this tool's names."""


FAULTS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
"""Throttle reasons that spoil a measurement; the others, such as the software power cap
of a loaded GPU, are normal. The power brake is an external signal that at least halves
the clocks and raises hw_slowdown."""


def throttle_faults(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the throttle reasons that make a measurement worthless.

    They are heat and hardware slowdown.
    """
    return tuple(name for name in names or () if name in FAULTS)


_NETWORK_FILESYSTEMS = (
    "9p afs beegfs ceph cifs coda daos dfuse fhgfs gcsfuse glusterfs goofys gpfs"
    " juicefs lustre mfs mount_s3 ncpfs nfs nfs4 orangefs panfs pvfs2 rclone s3fs"
    " seaweedfs smb3 smbfs sshfs wekafs"
)
"""Types of network file systems, as ``/proc/mounts`` names them."""


def is_network_filesystem(filesystem_type: str | None) -> bool:
    """Return True if files on this type of file system are on another machine."""
    name = (filesystem_type or "").lower().removeprefix("fuse.")
    return name in _NETWORK_FILESYSTEMS.split()
