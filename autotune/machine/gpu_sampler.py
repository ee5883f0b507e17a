"""Time series of GPU activity during a measurement.

A process (``python -m autotune.machine.gpu_sampler UUID…``) samples all GPUs of a node.
It pickles each sample to its standard output, until its standard input closes. No other
process reads GPM counters meanwhile, because concurrent GPM calls have crashed drivers.
If a call of the driver never returns, samples are missing and the process is killed.
"""

import collections
import contextlib
import math
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Literal

from autotune.base.clock import Clock, SystemClock
from trainer.formats.gpus import GpmWindow, GpuSample, GpuSeries, Unavailable
from trainer.formats.nvml import MIN_INTERVAL_S, GpuMonitor, NvmlMonitor

GPM_WINDOW_S = 0.5
"""Length of a counter window: NVML's counters change several times in it, and it fits
inside a timed window."""
ANSWER_WITHIN_S = 10.0
"""Timeout of the next sample, in seconds."""
START_WITHIN_S = 60.0
"""Timeout of the first sample, in seconds: Python and NVML may load from a slow shared
disk."""
MOST_READINGS = 2**17
"""Most samples and counter windows kept until they are taken: twenty minutes of eight
GPUs."""
_POLL_S = 0.02
"""Time between two looks for samples, in seconds."""

Reading = tuple[str, Literal["sample", "gpm"], GpuSample | GpmWindow | Unavailable]
"""UUID of a GPU, and one sample or counter window of it."""


class GpuSampler:
    """Sampler of GPUs in a separate process, which this process cannot delay.

    Args:
        uuids: UUIDs of the GPUs.
        program: Arguments of the Python that samples; tests replace it.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        program: Sequence[str] = ("-P", "-m", "autotune.machine.gpu_sampler"),
    ) -> None:
        self._command = [sys.executable, *program, *uuids]
        self._last_series = {uuid: GpuSeries() for uuid in uuids}
        self._process: subprocess.Popen[bytes] | None = None
        self._readings: collections.deque[Reading] = collections.deque(
            maxlen=MOST_READINGS
        )
        self._timeout_s = START_WITHIN_S
        self._lost_reason: str | None = None

    def start(self) -> None:
        """Start the process, unless it runs or was lost."""
        has_gpus = bool(self._last_series)
        if not has_gpus or self._process is not None or self._lost_reason is not None:
            return
        # Its own session: Ctrl-C is for this process, which then stops it.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._readings.clear()
        self._receiver = threading.Thread(
            target=_receive,
            args=(self._process.stdout, self._readings.append),
            daemon=True,
        )
        self._receiver.start()

    def take(self) -> Mapping[str, GpuSeries]:
        """Return the samples since the last call, by UUID.

        It waits for at least one. A GPU without samples has the reason for their
        absence.
        """
        readings: list[Reading] = []
        deadline_s = time.monotonic() + self._timeout_s
        while self._process is not None and not readings:
            # Look first, as the process may exit after its last samples.
            has_exited = not self._receiver.is_alive()
            is_late = time.monotonic() > deadline_s
            readings = [self._readings.popleft() for _ in range(len(self._readings))]
            if readings:
                self._timeout_s = ANSWER_WITHIN_S
            elif has_exited:
                self._give_up("has exited")
            elif is_late:
                self._give_up(f"has not responded for {self._timeout_s:.0f} s")
            else:
                time.sleep(_POLL_S)
        if self._process is None:
            reason = self._lost_reason or "the sampler was not started"
            return {
                uuid: GpuSeries(lacking=reason, gpm_lacking=reason)
                for uuid in self._last_series
            }
        self._last_series = series_of(readings, self._last_series)
        return self._last_series

    def _give_up(self, reason: str) -> None:
        """Stop the process for good."""
        self.stop(grace_s=0)
        self._lost_reason = f"the process that samples the GPUs {reason}"

    def stop(self, grace_s: float = 2.0) -> None:
        """End the process.

        If it is stuck in the driver, it may not end before that call returns.
        """
        process = self._process
        self._process = None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)


def _receive(stream: IO[bytes], keep: Callable[[Reading], None]) -> None:
    """Read samples until the process that writes them ends."""
    with stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            keep(pickle.load(stream))


def series_of(
    readings: Sequence[Reading], last_series: Mapping[str, GpuSeries]
) -> dict[str, GpuSeries]:
    """Group samples and counter windows by GPU.

    The last reason for a missing sample stays until there is a sample.

    Args:
        readings: Samples and counter windows of all GPUs.
        last_series: The series before these, by UUID.
    """
    series = {}
    for uuid, last in last_series.items():
        samples: list[GpuSample] = []
        windows: list[GpmWindow] = []
        lacking = last.lacking
        gpm_lacking = last.gpm_lacking
        for reading_uuid, kind, value in readings:
            if reading_uuid != uuid:
                continue
            reason = value.reason if isinstance(value, Unavailable) else None
            if kind == "sample":
                lacking = reason
            else:
                gpm_lacking = reason
            if isinstance(value, GpuSample):
                samples.append(value)
            elif isinstance(value, GpmWindow):
                windows.append(value)
        series[uuid] = GpuSeries(
            samples=tuple(samples),
            lacking=lacking,
            gpm=tuple(windows),
            gpm_lacking=gpm_lacking,
        )
    return series


def sample_gpus(
    monitor: GpuMonitor,
    uuids: Sequence[str],
    *,
    write: Callable[[Reading], None],
    ended: Callable[[float], bool],
    clock: Clock,
) -> None:
    """Sample GPUs every ``MIN_INTERVAL_S``.

    GPM counters are read in adjacent windows of ``GPM_WINDOW_S``.

    Args:
        monitor: The GPUs.
        uuids: UUIDs of the GPUs to sample.
        write: Function that keeps a sample.
        ended: Function that waits this many seconds, or until sampling has to end, and
            returns True if so.
        clock: Source of the time.
    """
    window_start_s = -math.inf
    while True:
        now_s = clock.monotonic_s()
        for uuid in uuids:
            write((uuid, "sample", monitor.sample(uuid)))
        if now_s - window_start_s >= GPM_WINDOW_S:
            window_start_s = now_s
            for uuid in uuids:
                write((uuid, "gpm", monitor.gpm(uuid)))
        next_sample_s = now_s + MIN_INTERVAL_S
        if ended(max(0.0, next_sample_s - clock.monotonic_s())):
            return


def main(monitor: GpuMonitor | None = None) -> None:
    """Sample the GPUs that the command line names, until standard input closes."""

    def write(reading: Reading) -> None:
        pickle.dump(reading, sys.stdout.buffer)
        sys.stdout.buffer.flush()

    def ended(wait_s: float) -> bool:
        # Nothing is ever written to standard input, so it is readable once it closes.
        readable, _, _ = select.select([0], [], [], wait_s)
        return bool(readable)

    nvml = monitor or NvmlMonitor()
    sample_gpus(nvml, sys.argv[1:], write=write, ended=ended, clock=SystemClock())
    nvml.close()


if __name__ == "__main__":
    main()
