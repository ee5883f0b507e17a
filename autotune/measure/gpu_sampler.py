"""Time series of what GPUs do while something else is measured: a port, the real one with a process for each GPU."""

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from autotune.core.hardware import GpuSeries
from autotune.measure.clock import Clock
from autotune.measure.gpm import MIN_INTERVAL_S
from autotune.measure.gpu_sampling import Sampling, series_from_json
from autotune.measure.nvml import GpuMonitor

GPM_WINDOW_S = 0.5
"""Long enough for NVML's counters to have moved several times, short enough to lie inside a measured window."""
ANSWER_WITHIN_S = 10.0
"""A driver's call may never return; whoever waits for its figures must go on."""
START_WITHIN_S = 60.0
"""Python and NVML may come from a slow shared disk."""


class Sampler(Protocol):
    """Samples some GPUs from its start on."""

    def start(self) -> None:
        """Begin; does nothing where it has begun."""
        ...

    def take(self) -> Mapping[str, GpuSeries]:
        """What came since the last call, by UUID."""
        ...

    def stop(self) -> None:
        """End."""
        ...


def sampling_command(uuid: str, interval_s: float, gpm_window_s: float) -> list[str]:
    """How the process of one GPU is started."""
    return [sys.executable, "-m", "autotune.measure.gpu_sampling", uuid, str(interval_s), str(gpm_window_s)]


class GpuSampler:
    """Samples every GPU in a process of its own, so that this one's work and its locks delay no sample.

    Args:
        uuids: The GPUs.
        interval_s: Time between samples of one GPU, at least 0.1.
        gpm_window_s: Length of a window of counters, at least 0.1.
        command: How the process of a GPU is started.

    Raises:
        ValueError: If a time is shorter.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        interval_s: float = MIN_INTERVAL_S,
        gpm_window_s: float = GPM_WINDOW_S,
        command: Callable[[str, float, float], list[str]] = sampling_command,
    ) -> None:
        if min(interval_s, gpm_window_s) < MIN_INTERVAL_S:
            shorter = min(interval_s, gpm_window_s)
            raise ValueError(f"GPUs cannot be sampled every {shorter} s: use at least {MIN_INTERVAL_S} s")
        self._commands = {uuid: command(uuid, interval_s, gpm_window_s) for uuid in uuids}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lost: dict[str, str] = {}
        self._answered: set[str] = set()

    def start(self) -> None:
        """Start the processes that do not run yet."""
        for uuid, command in self._commands.items():
            if uuid not in self._processes and uuid not in self._lost:
                self._processes[uuid] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for this process, which then stops them
                )

    def take(self) -> dict[str, GpuSeries]:
        """What came since the last call, by UUID; of a process that does not answer, why there is nothing."""
        for uuid, process in list(self._processes.items()):
            assert process.stdin is not None
            try:
                process.stdin.write(b"take\n")
                process.stdin.flush()
            except OSError:
                self._lose(uuid, "the process that samples the GPU has ended")
        return {uuid: self._series(uuid) for uuid in self._commands}

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()  # stuck in the driver, it may not end before that lets it go
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _series(self, uuid: str) -> GpuSeries:
        process = self._processes.get(uuid)
        if process is None:
            reason = self._lost.get(uuid, "the sampler was not started")
            return GpuSeries(lacking=reason, gpm_lacking=reason)
        assert process.stdout is not None
        limit_s = ANSWER_WITHIN_S if uuid in self._answered else START_WITHIN_S
        self._answered.add(uuid)
        readable, _, _ = select.select([process.stdout], [], [], limit_s)
        line = process.stdout.readline() if readable else b""
        if not line.endswith(b"\n"):
            what = "has ended" if readable else f"has not answered for {limit_s:.0f} s"
            self._lose(uuid, f"the process that samples the GPU {what}")
            return self._series(uuid)
        return series_from_json(json.loads(line))

    def _lose(self, uuid: str, reason: str) -> None:
        process = self._processes.pop(uuid)
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._lost[uuid] = reason


class FakeGpuSampler:
    """Samples GPUs in this process: once when it starts, and once whenever it is asked.

    Args:
        monitor: Where readings come from.
        uuids: The GPUs.
        clock: The time.
    """

    def __init__(self, monitor: GpuMonitor, uuids: Sequence[str], clock: Clock) -> None:
        self._monitor, self._uuids, self._clock = monitor, uuids, clock
        self._sampling: dict[str, Sampling] = {}

    def start(self) -> None:
        """Read once."""
        if not self._sampling:
            for uuid in self._uuids:
                self._sampling[uuid] = Sampling(self._monitor, uuid, gpm_window_s=0.0, clock=self._clock)
                self._sampling[uuid].tick()

    def take(self) -> dict[str, GpuSeries]:
        """Read once more, and give all since the last call."""
        for sampling in self._sampling.values():
            sampling.tick()
        return {uuid: sampling.take() for uuid, sampling in self._sampling.items()}

    def stop(self) -> None:
        """Nothing runs."""
