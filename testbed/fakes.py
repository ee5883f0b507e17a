"""Fakes of a clock, a host, GPUs and a machine that runs trials.

Each stands for a ``Protocol`` of ``autotune``; its answers are scripted or computed.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autotune.base.clock import Clock, SystemClock
from autotune.machine import values
from autotune.machine.gpu_sampler import Reading, series_of
from autotune.machine.values import HostFacts
from autotune.trials.outcomes import Outcome
from autotune.trials.values import Trial
from trainer.formats.gpus import (
    GpmWindow,
    GpuFacts,
    GpuProcess,
    GpuSample,
    GpuSeries,
    Unavailable,
)
from trainer.formats.nvml import SAMPLE_FIGURES, GpuMonitor

HOST = HostFacts(
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
    nics=(
        values.NicFacts(name="lo", speed_bits_per_s=None, is_up=True, is_loopback=True),
    ),
)
GPU_FACTS = GpuFacts(
    uuid="GPU-0",
    index=0,
    name="GpuModel",
    total_bytes=80 * 2**30,
    mig_enabled=False,
    power_cap_w=350.0,
    compute_mode="default",
    driver="550.1",
    compute_capability=(9, 0),
)
SAMPLE = GpuSample(
    time_s=0.0,
    utilisation=0.75,
    used_bytes=3 * 2**30,
    power_w=312.5,
    sm_clock_mhz=1700,
    throttle_reasons=("sw_power_cap",),
    temperature_c=61,
    process_count=1,
    energy_j=5000.5,
    memory_utilisation=0.1,
)
GPM_WINDOW = GpmWindow(
    start_s=0.0,
    end_s=0.0,
    sm_utilisation=0.9,
    sm_occupancy=0.5,
    tensor_active=0.4,
    dram_active=0.3,
    pcie_rx_bytes_per_s=3.0 * 2**20,
)


class FakeClock:
    """A clock that moves only in ``sleep``."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def monotonic_s(self) -> float:
        return self._now_s

    def utc_now(self) -> datetime:
        return datetime(2025, 1, 1, tzinfo=UTC) + timedelta(seconds=self._now_s - 1000)

    def sleep(self, duration_s: float) -> None:
        if duration_s < 0:
            raise ValueError(
                f"cannot sleep for {duration_s} s: the duration must not be negative"
            )
        self._now_s += duration_s


class FakeMachine:
    """A machine whose outcomes are computed; for tests of search and decisions."""

    def __init__(self, simulate: Callable[[Trial], Outcome]) -> None:
        self._simulate = simulate
        self.trials: list[Trial] = []

    def run(self, trial: Trial) -> Outcome:
        self.trials.append(trial)
        return self._simulate(trial)

    def close(self) -> None:
        """Do nothing, as nothing runs."""


class FakeHost:
    """An idle machine of eight CPUs, with these versions of libraries.

    Its disks are unknown.
    """

    def __init__(self, versions: Mapping[str, str] | None = None) -> None:
        self._versions = dict(versions or {})

    def facts(self, paths: Sequence[Path]) -> HostFacts:
        disks = (
            values.DiskFacts(
                path=str(path), filesystem_type=None, free_bytes=None, is_network=False
            )
            for path in paths
        )
        return replace(HOST, disks=tuple(disks))

    def library_versions(self) -> dict[str, str]:
        return self._versions

    def conflicting_distributions(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """A scripted GPU: each reading takes the next value of its list, the last stays."""

    facts: GpuFacts = GPU_FACTS
    used_bytes: Sequence[int | Unavailable] = (Unavailable(reason="not scripted"),)
    samples: Sequence[GpuSample | Unavailable] = (Unavailable(reason="not scripted"),)
    processes: Sequence[tuple[GpuProcess, ...] | Unavailable] = ((),)
    gpm: Sequence[GpmWindow | Unavailable] = (Unavailable(reason="not scripted"),)
    first_gpm: Sequence[Unavailable] = (
        Unavailable(reason="the first window has only begun", for_now=True),
    )
    """Answers to the first reading of GPM, which starts a window."""
    nvlinked: Sequence[str] | None = None
    """UUIDs of the GPUs that it reaches over NVLink; None if unknown."""


class FakeGpuMonitor:
    """Scripted GPUs; the clock stamps the times."""

    def __init__(
        self,
        script: Sequence[FakeGpu] = (),
        *,
        absent: str = "the script has no GPU",
        clock: Clock | None = None,
    ) -> None:
        self._script = {gpu.facts.uuid: gpu for gpu in script}
        self._absent = absent
        self._clock = clock or SystemClock()
        self._readings: Counter[tuple[str, str]] = Counter()
        """Number of readings so far, by UUID and figure."""
        self._gpm_read_s: dict[str, float] = {}
        """Time of the last reading of GPM, by UUID."""
        self._closed = False

    def devices(self) -> tuple[GpuFacts, ...]:
        return tuple(gpu.facts for gpu in self._script.values())

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def why_absent(self) -> str | None:
        return None if self._script else self._absent

    def used_bytes(self, uuid: str) -> int | Unavailable:
        used_bytes: int | Unavailable = self._next(uuid, "used_bytes")
        return used_bytes

    def sample(
        self, uuid: str, figures: Set[str] | None = None
    ) -> GpuSample | Unavailable:
        sample = self._next(uuid, "samples")
        if isinstance(sample, Unavailable):
            return sample
        unread = {} if figures is None else dict.fromkeys(SAMPLE_FIGURES - figures)
        return replace(sample, time_s=self._clock.monotonic_s(), **unread)

    def compute_processes(self, uuid: str) -> tuple[GpuProcess, ...] | Unavailable:
        processes: tuple[GpuProcess, ...] | Unavailable = self._next(uuid, "processes")
        return processes

    def nvlinked(self, uuid: str, other: str) -> bool | Unavailable:
        links = None
        if {uuid, other} <= self._script.keys() and not self._closed:
            links = self._script[uuid].nvlinked
        if links is None:
            return Unavailable(reason="not scripted")
        return other in links

    def gpm(self, uuid: str) -> GpmWindow | Unavailable:
        """Return the next scripted window, which lasts since the last call."""
        start_s = self._gpm_read_s.get(uuid)
        end_s = self._clock.monotonic_s()
        self._gpm_read_s[uuid] = end_s
        if start_s is None:
            first: GpmWindow | Unavailable = self._next(uuid, "first_gpm")
            return first
        window = self._next(uuid, "gpm")
        if isinstance(window, Unavailable):
            return window
        return replace(window, start_s=start_s, end_s=end_s)

    def close(self) -> None:
        self._closed = True

    def _next(self, uuid: str, figure: str) -> Any:
        if uuid not in self._script or self._closed:
            return Unavailable(
                reason=f"no readable GPU has the UUID {uuid}, or the monitor is closed"
            )
        answers = getattr(self._script[uuid], figure)
        index = min(self._readings[uuid, figure], len(answers) - 1)
        self._readings[uuid, figure] += 1
        return answers[index]


class FakeGpuSampler:
    """Samples GPUs in this process: once at its start, and before each ``take``."""

    def __init__(self, monitor: GpuMonitor, uuids: Sequence[str]) -> None:
        self._monitor = monitor
        self._last = {uuid: GpuSeries() for uuid in uuids}
        self._readings: list[Reading] | None = None

    def start(self) -> None:
        if self._readings is None:
            self._readings = []
            self.tick()

    def tick(self) -> None:
        """Sample each GPU once more."""
        assert self._readings is not None
        for uuid in self._last:
            self._readings.append((uuid, "sample", self._monitor.sample(uuid)))
            self._readings.append((uuid, "gpm", self._monitor.gpm(uuid)))

    def take(self) -> Mapping[str, GpuSeries]:
        if self._readings is not None:
            self.tick()
            self._last = series_of(self._readings, self._last)
            self._readings = []
        return self._last

    def stop(self) -> None:
        """Do nothing, as nothing runs."""
