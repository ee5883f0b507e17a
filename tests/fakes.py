"""Fakes of the ports of autotune.measure: what is scripted or computed, in place of a machine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from autotune.core.hardware import (
    DiskFacts,
    GpmWindow,
    GpuFacts,
    GpuProcess,
    GpuSample,
    GpuSeries,
    HostFacts,
    NicFacts,
    Unavailable,
)  # fmt: skip
from autotune.core.outcome import Outcome
from autotune.core.trial import Trial
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.gpu_sampler import Reading, series_of
from autotune.measure.nvml import GpuMonitor

T = TypeVar("T")


class FakeClock:
    """A clock that moves only when it is told to, or when someone sleeps.

    Args:
        monotonic_s: Where the monotonic clock starts.
        utc: Where the calendar starts.
    """

    def __init__(self, *, monotonic_s: float = 1000.0, utc: datetime = datetime(2025, 1, 1, tzinfo=UTC)) -> None:
        self._start_utc = utc
        self._start_s = monotonic_s
        self._now_s = monotonic_s

    def monotonic_s(self) -> float:
        """Seconds on the pretended CLOCK_MONOTONIC."""
        return self._now_s

    def utc_now(self) -> datetime:
        """The pretended date and time."""
        return self._start_utc + timedelta(seconds=self._now_s - self._start_s)

    def sleep(self, duration_s: float) -> None:
        """Move on at once; raises ``ValueError`` for a negative duration."""
        if duration_s < 0:
            raise ValueError(f"cannot sleep for {duration_s} s: the duration must not be negative")
        self._now_s += duration_s


class FakeMachine:
    """A machine whose outcomes are computed; for tests of search and decisions."""

    def __init__(self, simulate: Callable[[Trial], Outcome]) -> None:
        self._simulate = simulate
        self.trials: list[Trial] = []

    def run(self, trial: Trial) -> Outcome:
        """Compute the outcome."""
        self.trials.append(trial)
        return self._simulate(trial)

    def close(self) -> None:
        """Nothing runs."""


_EXAMPLE = HostFacts(
    cpus_online=8,
    cpus_affinity=8,
    cpus_quota=None,
    cpus_slurm=None,
    ram_total_bytes=32 * 2**30,
    ram_available_bytes=24 * 2**30,
    ram_limit_source="the system",
    ram_limit_bytes=None,
    shm_free_bytes=16 * 2**30,
    cpu_model="Example CPU",
    platform="Linux",
    python_version="3.11.0",
    load_average_1min=0.1,
    disks=(),
    nics=(NicFacts(name="lo", speed_bits_per_s=None, is_up=True, is_loopback=True),),
)


class FakeHost:
    """A host that is whatever the caller says.

    Args:
        facts: The host; its ``disks`` are what is known about their paths. An idle eight-CPU machine by default.
        versions: The installed libraries.
    """

    def __init__(self, facts: HostFacts = _EXAMPLE, versions: Mapping[str, str] | None = None) -> None:
        self._facts = facts
        self._versions = dict(versions or {})

    def facts(self, paths: Sequence[Path]) -> HostFacts:
        """The scripted host, with one disk per path; a path that was not scripted has an unknown file system."""
        known = {disk.path: disk for disk in self._facts.disks}
        disks = (
            known.get(str(path), DiskFacts(path=str(path), filesystem_type=None, free_bytes=None, is_network=False))
            for path in paths
        )
        return replace(self._facts, disks=tuple(disks))

    def library_versions(self) -> dict[str, str]:
        """The scripted versions."""
        return dict(self._versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """A scripted GPU: each reading takes the next value of its list, the last value stays."""

    facts: GpuFacts
    used_bytes: Sequence[int | Unavailable] = (Unavailable(reason="not scripted"),)
    samples: Sequence[GpuSample | Unavailable] = (Unavailable(reason="not scripted"),)
    processes: Sequence[tuple[GpuProcess, ...] | Unavailable] = ((),)
    gpm: Sequence[GpmWindow | Unavailable] = (Unavailable(reason="not scripted"),)
    nvlinked: Sequence[str] | None = None
    """UUIDs of the GPUs that it reaches over NVLink; None where nobody can tell."""


class FakeGpuMonitor:
    """GPUs that do what a script says; times are stamped by the clock.

    Args:
        script: The GPUs.
        absent: Why there is none; needed only where the script is empty.
        clock: Where the samples' times come from.
    """

    def __init__(
        self, script: Sequence[FakeGpu] = (), *, absent: str = "the script has no GPU", clock: Clock | None = None
    ) -> None:
        self._script = {gpu.facts.uuid: gpu for gpu in script}
        self._absent = absent
        self._clock = clock or SystemClock()
        self._position: dict[tuple[str, str], int] = {}
        self._counted_s: dict[str, float] = {}
        self._closed = False

    def devices(self) -> tuple[GpuFacts, ...]:
        """The scripted GPUs."""
        return tuple(gpu.facts for gpu in self._script.values())

    def unreadable(self) -> tuple[str, ...]:
        """None: a script is always readable."""
        return ()

    def why_absent(self) -> str | None:
        """The scripted reason, if there is no GPU."""
        return None if self._script else self._absent

    def used_bytes(self, uuid: str) -> int | Unavailable:
        """The next scripted figure."""
        return self._next(uuid, "used_bytes", lambda gpu: gpu.used_bytes)

    def sample(self, uuid: str) -> GpuSample | Unavailable:
        """The next scripted sample, at the time of now."""
        sample = self._next(uuid, "sample", lambda gpu: gpu.samples)
        return sample if isinstance(sample, Unavailable) else replace(sample, time_s=self._clock.monotonic_s())

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        """The next scripted list."""
        return self._next(uuid, "processes", lambda gpu: gpu.processes)

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        """Whether the script says so."""
        for one in (uuid, other):
            if one not in self._script:
                return Unavailable(reason=f"no readable GPU has the UUID {one}")
        if self._closed:
            return Unavailable(reason="the GPU monitor is closed")
        links = self._script[uuid].nvlinked
        return Unavailable(reason="not scripted") if links is None else other in links

    def gpm(self, uuid: str) -> GpmWindow | Unavailable:
        """Give the next scripted window since the last call."""
        if uuid not in self._counted_s or self._closed:
            self._counted_s[uuid] = self._clock.monotonic_s()
            return self._next(uuid, "begun", lambda gpu: (Unavailable(reason="the first window has only begun"),))
        window = self._next(uuid, "gpm", lambda gpu: gpu.gpm)
        start_s, self._counted_s[uuid] = self._counted_s[uuid], self._clock.monotonic_s()
        return (
            window if isinstance(window, Unavailable) else replace(window, start_s=start_s, end_s=self._counted_s[uuid])
        )

    def close(self) -> None:
        """Make every figure unavailable."""
        self._closed = True

    def _next(self, uuid: str, what: str, values: Callable[[FakeGpu], Sequence[T | Unavailable]]) -> T | Unavailable:
        if uuid not in self._script:
            return Unavailable(reason=f"no readable GPU has the UUID {uuid}")
        if self._closed:
            return Unavailable(reason="the GPU monitor is closed")
        listed = values(self._script[uuid])
        position = self._position.get((uuid, what), 0)
        self._position[uuid, what] = position + 1
        return listed[min(position, len(listed) - 1)]


class FakeGpuSampler:
    """Samples GPUs in this process: once when it starts, and once whenever it is asked."""

    def __init__(self, monitor: GpuMonitor, uuids: Sequence[str]) -> None:
        self._monitor = monitor
        self._last = {uuid: GpuSeries() for uuid in uuids}
        self._readings: list[Reading] | None = None

    def start(self) -> None:
        if self._readings is None:
            self._readings = []
            self.tick()

    def tick(self) -> None:
        """Read once more."""
        assert self._readings is not None
        for uuid in self._last:
            self._readings.append((uuid, "sample", self._monitor.sample(uuid)))
            self._readings.append((uuid, "gpm", self._monitor.gpm(uuid)))

    def take(self) -> Mapping[str, GpuSeries]:
        if self._readings is not None:
            self.tick()
            self._last, self._readings = series_of(self._readings, self._last), []
        return self._last

    def stop(self) -> None:
        """Nothing runs."""
