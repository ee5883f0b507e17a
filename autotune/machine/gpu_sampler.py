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
START_WITHIN_S = 60.0
"""Timeout of the first sample: Python and NVML may load from a slow shared disk."""
MOST_READINGS = 2**17
"""Most samples and counter windows kept until they are taken: twenty minutes of eight
GPUs."""
_POLL_S = 0.02

Reading = tuple[str, Literal["sample", "gpm"], GpuSample | GpmWindow | Unavailable]
"""UUID of a GPU, and one sample or counter window of it."""


class GpuSampler:
    """Sampler of GPUs in a separate process (``program``).

    So work and locks of this process delay no sample.
    """

    def __init__(
        self,
        uuids: Sequence[str],
        *,
        program: Sequence[str] = ("-P", "-m", "autotune.machine.gpu_sampler"),
    ) -> None:
        self._command = [sys.executable, *program, *uuids]
        self._last = {uuid: GpuSeries() for uuid in uuids}
        self._process: subprocess.Popen[bytes] | None = None
        self._readings: collections.deque[Reading] = collections.deque(
            maxlen=MOST_READINGS
        )
        self._within_s = START_WITHIN_S
        self._lost: str | None = None

    def start(self) -> None:
        """Start the process, unless it runs or was lost."""
        if self._last and self._process is None and self._lost is None:
            # Its own session: Ctrl-C is for this process, which then stops it.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._readings.clear()
            arguments = (self._process.stdout, self._readings.append)
            self._receiver = threading.Thread(
                target=_receive, args=arguments, daemon=True
            )
            self._receiver.start()

    def take(self) -> Mapping[str, GpuSeries]:
        """Return the samples since the last call, by UUID.

        It waits for at least one. A GPU without samples has the reason for their
        absence.
        """
        readings: list[Reading] = []
        late_s = time.monotonic() + self._within_s
        while self._process is not None and not readings:
            ended, late = not self._receiver.is_alive(), time.monotonic() > late_s
            if readings := [
                self._readings.popleft() for _ in range(len(self._readings))
            ]:
                self._within_s = ANSWER_WITHIN_S
            elif ended or late:
                what = (
                    "has exited"
                    if ended
                    else f"has not responded for {self._within_s:.0f} s"
                )
                self.stop(grace_s=0)
                self._lost = f"the process that samples the GPUs {what}"
            else:
                time.sleep(_POLL_S)
        if self._process is None:
            reason = self._lost or "the sampler was not started"
            return {
                uuid: GpuSeries(lacking=reason, gpm_lacking=reason)
                for uuid in self._last
            }
        self._last = series_of(readings, self._last)
        return self._last

    def stop(self, grace_s: float = 2.0) -> None:
        """End the process.

        If it is stuck in the driver, it may not end before that call returns.
        """
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)


def _receive(stream: IO[bytes], keep: Callable[[Reading], None]) -> None:
    with stream, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            keep(pickle.load(stream))


def series_of(
    readings: Sequence[Reading], last: Mapping[str, GpuSeries]
) -> dict[str, GpuSeries]:
    """Group samples and counter windows by GPU.

    The last reason for a missing sample stays until there is one.
    """

    def why(
        of_kind: Sequence[GpuSample | GpmWindow | Unavailable], before: str | None
    ) -> str | None:
        if not of_kind:
            return before
        return of_kind[-1].reason if isinstance(of_kind[-1], Unavailable) else None

    found = {}
    for uuid, before in last.items():
        samples = [
            reading
            for one, kind, reading in readings
            if (one, kind) == (uuid, "sample")
        ]
        windows = [
            reading for one, kind, reading in readings if (one, kind) == (uuid, "gpm")
        ]
        found[uuid] = GpuSeries(
            samples=tuple(one for one in samples if isinstance(one, GpuSample)),
            lacking=why(samples, before.lacking),
            gpm=tuple(one for one in windows if isinstance(one, GpmWindow)),
            gpm_lacking=why(windows, before.gpm_lacking),
        )
    return found


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
    counted_s = -math.inf
    while True:
        began_s = clock.monotonic_s()
        for uuid in uuids:
            write((uuid, "sample", monitor.sample(uuid)))
        if began_s - counted_s >= GPM_WINDOW_S:
            counted_s = began_s
            for uuid in uuids:
                write((uuid, "gpm", monitor.gpm(uuid)))
        if ended(max(0.0, began_s + MIN_INTERVAL_S - clock.monotonic_s())):
            return


def main(monitor: GpuMonitor | None = None) -> None:
    """Sample the GPUs that the command line names, until standard input closes."""

    def write(reading: Reading) -> None:
        pickle.dump(reading, sys.stdout.buffer)
        sys.stdout.buffer.flush()

    def ended(wait_s: float) -> bool:
        # Nothing is ever written there.
        return bool(select.select([0], [], [], wait_s)[0])

    nvml = monitor or NvmlMonitor()
    sample_gpus(nvml, sys.argv[1:], write=write, ended=ended, clock=SystemClock())
    nvml.close()


if __name__ == "__main__":
    main()
