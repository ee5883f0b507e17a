"""Time series of what GPUs do while something else is measured: a port, and a process that samples all GPUs of a node.

The process (``python -m autotune.measure.gpu_sampler INTERVAL_S GPM_WINDOW_S UUID…``) appends a JSON line for each
reading to a file, until its standard input closes. Nobody else reads GPM counters meanwhile, because concurrent GPM
calls have crashed drivers. If a call of the driver never returns, samples are missing and the process is killed.
"""

import contextlib
import fcntl
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any, Literal, Protocol, Self

from autotune.core.hardware import GpmWindow, GpuSample, GpuSeries, Unavailable
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.nvml import MIN_INTERVAL_S, GpuMonitor, NvmlMonitor

GPM_WINDOW_S = 0.5
"""Long enough for NVML's counters to have moved several times, short enough to lie inside a measured window."""
ANSWER_WITHIN_S = 10.0
START_WITHIN_S = 60.0
"""Python and NVML may come from a slow shared disk."""
MOST_BYTES = 2**28
"""Kept if nobody takes it: hours of samples of eight GPUs."""
_ROLL_BYTES = 2**24
_POLL_S = 0.02

Kind = Literal["sample", "gpm"]
Reading = tuple[str, Kind, GpuSample | GpmWindow | Unavailable]
"""Of the GPU with this UUID."""


class Sampler(Protocol):
    """Samples some GPUs from its start on."""

    def start(self) -> None:
        """Begin; do nothing if it has begun."""
        ...

    def take(self) -> Mapping[str, GpuSeries]:
        """Return what came since the last call, by UUID."""
        ...

    def stop(self) -> None:
        """End."""
        ...


class GpuSampler:
    """Samples GPUs in a process of its own, so that this one's work and its locks delay no sample.

    Args:
        uuids: The GPUs.
        interval_s: Time between samples of one GPU, at least 0.1.
        gpm_window_s: Length of a window of counters, at least 0.1.
        program: What samples.

    Raises:
        ValueError: If a time is shorter.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        interval_s: float = MIN_INTERVAL_S,
        gpm_window_s: float = GPM_WINDOW_S,
        program: Sequence[str] = ("-m", "autotune.measure.gpu_sampler"),
    ) -> None:
        if (shorter := min(interval_s, gpm_window_s)) < MIN_INTERVAL_S:
            raise ValueError(f"GPUs cannot be sampled every {shorter} s: use at least {MIN_INTERVAL_S} s")
        self._command = [sys.executable, *program, str(interval_s), str(gpm_window_s), *uuids]
        self._last = {uuid: GpuSeries() for uuid in uuids}
        self._process: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._offset = 0
        self._within_s = START_WITHIN_S
        self._lost: str | None = None

    def start(self) -> None:
        """Start the process, unless it runs or was lost."""
        if self._last and self._process is None and self._lost is None:
            self._file, self._offset = tempfile.TemporaryFile(buffering=0), 0  # noqa: SIM115 - closed by stop
            fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=self._file,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then stops it
            )

    def take(self) -> dict[str, GpuSeries]:
        """Return what came since the last call, by UUID, or why nothing did; wait for one reading at least."""
        readings: list[Reading] = []
        late_s = time.monotonic() + self._within_s
        while self._process is not None and not readings:
            ended, late = self._process.poll() is not None, time.monotonic() > late_s
            if readings := self._read():
                self._within_s = ANSWER_WITHIN_S
            elif ended or late:
                what = "has ended" if ended else f"has not answered for {self._within_s:.0f} s"
                self.stop(grace_s=0)
                self._lost = f"the process that samples the GPUs {what}"
            else:
                time.sleep(_POLL_S)
        if self._process is None:
            reason = self._lost or "the sampler was not started"
            return {uuid: GpuSeries(lacking=reason, gpm_lacking=reason) for uuid in self._last}
        self._last = series_of(readings, self._last)
        return self._last

    def stop(self, grace_s: float = 2.0) -> None:
        """End the process; stuck in the driver, it may not end before that lets it go."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert self._file is not None
            process.stdin.close()
            try:
                process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)
            self._file.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> list[Reading]:
        assert self._file is not None
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        lines, end, begun = os.pread(descriptor, size - self._offset, self._offset).rpartition(b"\n")
        self._offset += len(lines) + len(end)
        if not begun and size > _ROLL_BYTES:  # a reading that comes just now is lost
            os.ftruncate(descriptor, 0)
            self._offset = 0
        return [_reading_of(json.loads(line)) for line in lines.splitlines()]


def series_of(readings: Sequence[Reading], last: Mapping[str, GpuSeries]) -> dict[str, GpuSeries]:
    """Sort readings by GPU; the last reason for a missing one stays until there is one.

    Args:
        readings: In order of time.
        last: What was given before, by UUID.
    """

    def why(of_kind: Sequence[GpuSample | GpmWindow | Unavailable], before: str | None) -> str | None:
        if not of_kind:
            return before
        return of_kind[-1].reason if isinstance(of_kind[-1], Unavailable) else None

    found = {}
    for uuid, before in last.items():
        samples = [reading for one, kind, reading in readings if (one, kind) == (uuid, "sample")]
        windows = [reading for one, kind, reading in readings if (one, kind) == (uuid, "gpm")]
        found[uuid] = GpuSeries(
            samples=tuple(one for one in samples if isinstance(one, GpuSample)),
            gpm=tuple(one for one in windows if isinstance(one, GpmWindow)),
            lacking=why(samples, before.lacking),
            gpm_lacking=why(windows, before.gpm_lacking),
        )
    return found


def sample_gpus(
    monitor: GpuMonitor,
    uuids: Sequence[str],
    interval_s: float,
    gpm_window_s: float,
    *,
    write: Callable[[Reading], None],
    ended: Callable[[float], bool],
    clock: Clock,
) -> None:
    """Read GPUs again and again, and GPM counters in windows end to end.

    Args:
        monitor: Where readings come from.
        uuids: The GPUs.
        interval_s: Time between samples.
        gpm_window_s: Length of a window of counters.
        write: Keeps a reading.
        ended: Waits so many seconds, or until it is to end, and returns whether it is.
        clock: The time.
    """
    counted_s = -math.inf
    while True:
        began_s = clock.monotonic_s()
        for uuid in uuids:
            write((uuid, "sample", monitor.sample(uuid)))
        if began_s - counted_s >= gpm_window_s:
            counted_s = began_s
            for uuid in uuids:
                write((uuid, "gpm", monitor.gpm(uuid)))
        if ended(max(0.0, began_s + interval_s - clock.monotonic_s())):
            return


def _reading_of(line: tuple[str, Kind, dict[str, Any]]) -> Reading:
    uuid, kind, found = line
    if "reason" in found:
        return uuid, kind, Unavailable(**found)
    if kind == "gpm":
        return uuid, kind, GpmWindow(**found)
    reasons = found["throttle_reasons"]
    return uuid, kind, GpuSample(**found | {"throttle_reasons": None if reasons is None else tuple(reasons)})


def main(monitor: GpuMonitor | None = None) -> None:
    """Sample the GPUs that the command line names, until standard input closes."""
    interval_s, gpm_window_s, *uuids = sys.argv[1:]

    def write(reading: Reading) -> None:
        uuid, kind, found = reading
        if os.fstat(1).st_size < MOST_BYTES:
            os.write(1, json.dumps([uuid, kind, asdict(found)]).encode() + b"\n")

    def ended(wait_s: float) -> bool:
        return bool(select.select([0], [], [], wait_s)[0])  # nothing is ever written there

    nvml = monitor or NvmlMonitor()
    sample_gpus(nvml, uuids, float(interval_s), float(gpm_window_s), write=write, ended=ended, clock=SystemClock())
    nvml.close()


if __name__ == "__main__":
    main()
