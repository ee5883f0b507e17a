"""The host as a port: CPUs, memory, disks and network.

They are described as Linux describes them to this process. Affinity, control groups (v1
and v2, at every level) and SLURM limit the CPUs and memory of a process; the least
counts.
"""

import contextlib
import importlib.metadata
import operator
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from autotune.errors import MachineLacks
from autotune.machine.values import (
    DiskFacts,
    HostFacts,
    NicFacts,
    is_network_filesystem,
)

_SLURM_CPU_VARIABLES = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
"""Environment variables with SLURM's number of CPUs, in order of preference."""
PACKAGES = ("autotune", "trainer")
"""Top-level packages that this project installs."""
DISTRIBUTION = "encoder-autotune"
"""Name of this project on PyPI."""
LIBRARIES = ("torch", "transformers", "numpy", "optuna")
"""Libraries whose versions matter to measurements."""


class Host(Protocol):
    """Source of facts about the host."""

    def facts(self, paths: Sequence[Path]) -> HostFacts:
        """Describe the host now.

        Its ``disks`` are by path; a path may be missing.

        Raises:
            MachineLacks: If there is no ``/proc``.
        """

    def library_versions(self) -> dict[str, str]:
        """Return the versions of the ``LIBRARIES`` that are installed.

        None of them is imported.
        """

    def conflicting_distributions(self) -> tuple[str, ...]:
        """Return the names of other distributions with one of this tool's packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A mounted file system."""

    root: str
    """Path in the file system that is mounted."""
    point: str
    """Path at which it is mounted."""
    filesystem_type: str
    options: frozenset[str]


class SystemHost:
    """The host of this process.

    Args:
        root: Directory with ``proc``, ``sys`` and ``dev``.
        environment: Environment variables; None for those of the process.
    """

    def __init__(
        self, root: Path = Path("/"), environment: Mapping[str, str] | None = None
    ) -> None:
        self._root = root
        self._environment = os.environ if environment is None else environment

    def facts(self, paths: Sequence[Path]) -> HostFacts:
        """Read everything again.

        Raises:
            MachineLacks: If there is no Linux ``/proc``.
        """
        import psutil

        memory = self._memory()
        mounts = self._mounts()
        available_bytes, source, limit_bytes = min(
            self._memory_bounds(mounts, memory), key=operator.itemgetter(0)
        )
        nics = [
            NicFacts(
                name=name,
                speed_bits_per_s=nic.speed * 10**6 or None,
                is_up=nic.isup,
                is_loopback="loopback" in nic.flags.split(","),
            )
            for name, nic in sorted(psutil.net_if_stats().items())
        ]
        return HostFacts(
            cpus_online=psutil.cpu_count() or 1,
            cpus_affinity=len(os.sched_getaffinity(0)),
            cpus_quota=min(self._cpu_quotas(mounts), default=None),
            cpus_slurm=self._slurm_cpus(),
            ram_total_bytes=memory["MemTotal"],
            ram_available_bytes=available_bytes,
            ram_limit_source=source,
            ram_limit_bytes=limit_bytes,
            shm_free_bytes=_free_bytes(self._root / "dev/shm"),
            cpu_model=self._cpu_model(),
            platform=platform.platform(),
            python_version=platform.python_version(),
            load_average_1min=os.getloadavg()[0],
            disks=tuple(self._disk(path, mounts) for path in paths),
            nics=tuple(nics),
        )

    def library_versions(self) -> dict[str, str]:
        """Read the versions from the packages' own metadata."""
        versions = {}
        for name in LIBRARIES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        return versions

    def conflicting_distributions(self) -> tuple[str, ...]:
        """Read them from the packages' own metadata.

        PyPI has other distributions that install a package ``autotune`` or ``trainer``.
        """
        by_package = importlib.metadata.packages_distributions()
        names = {name for package in PACKAGES for name in by_package.get(package, ())}
        return tuple(sorted(names - {DISTRIBUTION}))

    def _memory(self) -> dict[str, int]:
        """Return the bytes of each entry of ``/proc/meminfo``.

        Raises:
            MachineLacks: If it has no ``MemTotal``.
        """
        path = self._root / "proc/meminfo"
        lines = re.findall(r"^(\w+):\s+(\d+) kB$", _read(path) or "", re.MULTILINE)
        memory = {name: int(kib) * 1024 for name, kib in lines}
        if "MemTotal" not in memory:
            raise MachineLacks(
                f"{path} does not contain the amount of memory",
                next_step="Run this on Linux with /proc mounted.",
            )
        return memory

    def _cpu_model(self) -> str | None:
        text = _read(self._root / "proc/cpuinfo") or ""
        model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        return None if model is None else model[1].strip()

    def _slurm_cpus(self) -> int | None:
        """Return the CPUs that SLURM gave this task; None outside a job."""
        for name in _SLURM_CPU_VARIABLES:
            count = _whole_number(self._environment.get(name))
            if count:
                return count
        return None

    def _cpu_quotas(self, mounts: Sequence[_Mount]) -> Iterator[float]:
        """Yield CPU time per wall time of each control group that limits it."""
        for group in self._control_groups(mounts, None):
            quota, _, period = (_read(group / "cpu.max") or "").partition(" ")
            yield from _quota(quota, period)
        for group in self._control_groups(mounts, "cpu"):
            yield from _quota(
                _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
            )

    def _memory_bounds(
        self, mounts: Sequence[_Mount], memory: Mapping[str, int]
    ) -> Iterator[tuple[int, str, int | None]]:
        """Yield the bounds of this process's memory: available bytes, source and limit.

        They are the system's, and those of each control group that limits this process.
        A group's page cache is charged to it; the inactive part is reclaimed on demand,
        so it counts as available.
        """
        available = memory.get("MemAvailable", memory.get("MemFree", 0))
        yield available, "the system", None
        layouts = (
            ("cgroup v2", None, "memory.max", "memory.current", "inactive_file"),
            (
                "cgroup v1",
                "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
        )
        for source, controller, limit_name, usage_name, cache_key in layouts:
            for group in self._control_groups(mounts, controller):
                limit_bytes = _whole_number(_read(group / limit_name))
                usage_bytes = _whole_number(_read(group / usage_name))
                if limit_bytes is None or usage_bytes is None:
                    continue
                # Version 1 writes "no limit" as a number near 2**63.
                if limit_bytes >= memory["MemTotal"]:
                    continue
                statistics = _read(group / "memory.stat") or ""
                cache = re.search(rf"^{cache_key} (\d+)$", statistics, re.MULTILINE)
                cache_bytes = 0 if cache is None else int(cache[1])
                used_bytes = max(0, usage_bytes - cache_bytes)
                yield max(0, limit_bytes - used_bytes), source, limit_bytes

    def _control_groups(
        self, mounts: Sequence[_Mount], controller: str | None
    ) -> Iterator[Path]:
        """Yield this process's control group and its visible ancestors.

        The innermost group is the first.

        Args:
            mounts: All mounts.
            controller: Controller of version 1; None for version 2.
        """
        mount = _control_group_mount(mounts, controller)
        if mount is None:
            return
        for line in (_read(self._root / "proc/self/cgroup") or "").splitlines():
            _, controllers, group = line.split(":", 2)
            if controller is None:
                # Version 2 has one hierarchy, whose line names no controller.
                is_of_controller = controllers == ""
            else:
                is_of_controller = controller in controllers.split(",")
            if not is_of_controller:
                continue
            group_path = PurePosixPath(group)
            # A container may show the host's path but mount only its own subtree, whose
            # top is our group.
            inside = PurePosixPath()
            if group_path.is_relative_to(mount.root):
                inside = group_path.relative_to(mount.root)
            if ".." in inside.parts:
                inside = PurePosixPath()
            for level in (inside, *inside.parents):
                yield self._root / mount.point.lstrip("/") / level

    def _mounts(self) -> list[_Mount]:
        """Return the mounts of ``/proc/self/mountinfo``; see proc(5) for its fields."""
        mounts = []
        for line in (_read(self._root / "proc/self/mountinfo") or "").splitlines():
            before, separator, after = line.partition(" - ")
            mount_fields = before.split(" ")
            filesystem_fields = after.split(" ")
            if not separator or len(mount_fields) < 5 or len(filesystem_fields) < 3:
                continue
            mounts.append(
                _Mount(
                    root=_unescape(mount_fields[3]),
                    point=_unescape(mount_fields[4]),
                    filesystem_type=filesystem_fields[0],
                    options=frozenset(filesystem_fields[2].split(",")),
                )
            )
        return mounts

    def _disk(self, path: Path, mounts: Sequence[_Mount]) -> DiskFacts:
        """Describe the file system that holds a path, or will once it exists."""
        root = self._root.resolve()
        absolute = path.absolute() if root == Path("/") else path
        real = (root / str(absolute).lstrip("/")).resolve()
        # Mount points are relative to the root.
        inside = real.relative_to(root) if real.is_relative_to(root) else real
        path_in_root = PurePosixPath("/") / inside
        candidates = [
            mount for mount in mounts if path_in_root.is_relative_to(mount.point)
        ]
        # Of two mounts on one point the later one hides the earlier.
        mount = max(
            reversed(candidates),
            key=lambda mount: len(PurePosixPath(mount.point).parts),
            default=None,
        )
        filesystem_type = None if mount is None else mount.filesystem_type
        existing = real
        for ancestor in (real, *real.parents):
            if ancestor.exists():
                existing = ancestor
                break
        return DiskFacts(
            path=str(path),
            filesystem_type=filesystem_type,
            free_bytes=_free_bytes(existing),
            is_network=is_network_filesystem(filesystem_type),
        )


def _control_group_mount(
    mounts: Sequence[_Mount], controller: str | None
) -> _Mount | None:
    """Return the mount of a controller of version 1, or with None, of version 2."""
    for mount in mounts:
        if controller is None and mount.filesystem_type == "cgroup2":
            return mount
        if mount.filesystem_type == "cgroup" and controller in mount.options:
            return mount
    return None


def _read(path: Path) -> str | None:
    """Return a small text file, or ``None`` if it is absent or not readable."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def _whole_number(text: str | None) -> int | None:
    """Return a count, or ``None`` for any other text, such as ``max`` and ``-1``."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdecimal() else None


def _quota(quota_us: str | None, period_us: str | None) -> Iterator[float]:
    """Yield the CPU time per wall time of a control group, if it has a limit."""
    quota = _whole_number(quota_us)
    period = _whole_number(period_us)
    if quota and period:
        yield quota / period


def _unescape(text: str) -> str:
    r"""Undo mountinfo's octal escapes, such as ``\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _free_bytes(path: Path) -> int | None:
    """Return the bytes that a user without privileges may still write there.

    Quotas are not considered.

    Returns:
        The bytes, or None if they are unknown.
    """
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return None
