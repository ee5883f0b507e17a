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

_CPUS_OF_SLURM = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
PACKAGES = ("autotune", "trainer")
"""Top-level packages that this project installs."""
DISTRIBUTION = "encoder-autotune"
LIBRARIES = ("torch", "transformers", "numpy", "optuna")


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
    root: str
    point: str
    filesystem_type: str
    options: frozenset[str]


class SystemHost:
    """The host of this process.

    ``root`` holds ``proc``, ``sys`` and ``dev``; ``environment`` is by default the
    process's own.
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

        text = _read(self._root / "proc/meminfo") or ""
        memory = {
            name: int(kib) * 1024
            for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
        }
        if "MemTotal" not in memory:
            told = (
                f"{self._root / 'proc/meminfo'} does not contain the amount of memory"
            )
            raise MachineLacks(told, next_step="Run this on Linux with /proc mounted.")
        mounts = self._mounts()
        available_bytes, source, limit_bytes = min(
            self._memory_bounds(mounts, memory), key=operator.itemgetter(0)
        )
        model = re.search(
            r"^model name\s*:\s*(.+)$",
            _read(self._root / "proc/cpuinfo") or "",
            re.MULTILINE,
        )
        return HostFacts(
            cpus_online=psutil.cpu_count() or 1,
            cpus_affinity=len(os.sched_getaffinity(0)),
            cpus_quota=min(self._cpu_quotas(mounts), default=None),
            cpus_slurm=next(
                filter(
                    None,
                    (_whole(self._environment.get(name)) for name in _CPUS_OF_SLURM),
                ),
                None,
            ),
            ram_total_bytes=memory["MemTotal"],
            ram_available_bytes=available_bytes,
            ram_limit_source=source,
            ram_limit_bytes=limit_bytes,
            shm_free_bytes=_free_bytes(self._root / "dev/shm"),
            cpu_model=model[1].strip() if model else None,
            platform=platform.platform(),
            python_version=platform.python_version(),
            load_average_1min=os.getloadavg()[0],
            disks=tuple(self._disk(path, mounts) for path in paths),
            nics=tuple(
                NicFacts(
                    name=name,
                    speed_bits_per_s=nic.speed * 10**6 or None,
                    is_up=nic.isup,
                    is_loopback="loopback" in nic.flags.split(","),
                )
                for name, nic in sorted(psutil.net_if_stats().items())
            ),
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
                limit, usage = (
                    _whole(_read(group / limit_name)),
                    _whole(_read(group / usage_name)),
                )
                # Version 1 writes "no limit" as a number near 2**63.
                if limit is None or usage is None or limit >= memory["MemTotal"]:
                    continue
                cache = re.search(
                    rf"^{cache_key} (\d+)$",
                    _read(group / "memory.stat") or "",
                    re.MULTILINE,
                )
                used = usage - min(usage, int(cache[1]) if cache else 0)
                yield max(0, limit - used), source, limit

    def _control_groups(
        self, mounts: Sequence[_Mount], controller: str | None
    ) -> Iterator[Path]:
        """Yield this process's control group and its visible ancestors.

        The group is of a v1 controller, or of v2. The innermost group is the first.
        """
        for line in (_read(self._root / "proc/self/cgroup") or "").splitlines():
            _, controllers, group = line.split(":", 2)
            mine = (
                controllers == ""
                if controller is None
                else controller in controllers.split(",")
            )
            kind = "cgroup2" if controller is None else "cgroup"
            holds = (
                one
                for one in mounts
                if one.filesystem_type == kind and controller in {None, *one.options}
            )
            mount = next(holds, None)
            if not mine or mount is None:
                continue
            path = PurePosixPath(group)
            inside = (
                path.relative_to(mount.root)
                if path.is_relative_to(mount.root)
                else PurePosixPath()
            )
            # A container may show the host's path but mount only its own subtree, whose
            # top is our group.
            inside = PurePosixPath() if ".." in inside.parts else inside
            for level in (inside, *inside.parents):
                yield self._root / mount.point.lstrip("/") / level

    def _mounts(self) -> list[_Mount]:
        """Return the mounts of ``/proc/self/mountinfo``; see proc(5) for its fields."""
        mounts = []
        for line in (_read(self._root / "proc/self/mountinfo") or "").splitlines():
            before, separator, after = line.partition(" - ")
            left, right = before.split(" "), after.split(" ")
            if separator and len(left) > 4 and len(right) > 2:
                options = frozenset(right[2].split(","))
                root, point = _unescape(left[3]), _unescape(left[4])
                mounts.append(
                    _Mount(
                        root=root,
                        point=point,
                        filesystem_type=right[0],
                        options=options,
                    )
                )
        return mounts

    def _disk(self, path: Path, mounts: Sequence[_Mount]) -> DiskFacts:
        root = self._root.resolve()
        real = (
            root / str(path.absolute() if root == Path("/") else path).lstrip("/")
        ).resolve()
        inside = PurePosixPath("/") / (
            real.relative_to(root) if real.is_relative_to(root) else real
        )
        holders = [mount for mount in mounts if inside.is_relative_to(mount.point)]
        # Of two mounts on one point the later one hides the earlier.
        holder = max(
            reversed(holders),
            key=lambda mount: len(PurePosixPath(mount.point).parts),
            default=None,
        )
        kind = holder.filesystem_type if holder else None
        existing = next(
            (place for place in (real, *real.parents) if place.exists()), real
        )
        free, is_network = _free_bytes(existing), is_network_filesystem(kind)
        return DiskFacts(
            path=str(path), filesystem_type=kind, free_bytes=free, is_network=is_network
        )


def _read(path: Path) -> str | None:
    """Return a small text file, or ``None`` if it is absent or not readable."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return None


def _whole(text: str | None) -> int | None:
    """Return a count, or ``None`` for any other text, such as ``max`` and ``-1``."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isascii() and stripped.isdecimal() else None


def _quota(quota_us: str | None, period_us: str | None) -> Iterator[float]:
    quota, period = _whole(quota_us), _whole(period_us)
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
