"""The process that samples one GPU: ``python -m autotune.measure.gpu_sampling UUID INTERVAL_S GPM_WINDOW_S``.

It reads NVML and, where there is GPM, hardware counters in windows end to end; nobody else reads counters of that GPU,
because concurrent GPM calls have crashed drivers. A line on standard input asks for what came since the last one; the
answer is one JSON line. When standard input closes, it ends.
"""

import json
import os
import select
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from autotune.core.hardware import GpmWindow, GpuSample, GpuSeries, Unavailable
from autotune.measure.clock import Clock, SystemClock
from autotune.measure.nvml import GpuMonitor, NvmlMonitor

MOST_SAMPLES = 100_000
"""Kept for somebody who never asks; hours of them."""


class Sampling:
    """The series of one GPU as it grows.

    Args:
        monitor: Where readings come from.
        uuid: The GPU.
        gpm_window_s: Length of a window of counters.
        clock: The time.
    """

    def __init__(self, monitor: GpuMonitor, uuid: str, *, gpm_window_s: float, clock: Clock) -> None:
        self._monitor, self._uuid, self._clock = monitor, uuid, clock
        self._gpm_window_s = gpm_window_s
        self._probe = monitor.gpm_window(uuid)
        self._probe.start()
        self._gpm_since_s = clock.monotonic_s()
        self._samples: list[GpuSample] = []
        self._gpm: list[GpmWindow] = []
        self._lacking: str | None = None
        self._gpm_lacking: str | None = None

    def tick(self) -> None:
        """Read once; a window of counters that is long enough ends, and the next one begins."""
        sample = self._monitor.sample(self._uuid)
        if isinstance(sample, Unavailable):
            self._lacking = sample.reason
        elif len(self._samples) < MOST_SAMPLES:
            self._samples.append(sample)
        if self._clock.monotonic_s() - self._gpm_since_s >= self._gpm_window_s:
            found = self._probe.stop()
            if isinstance(found, Unavailable):
                self._gpm_lacking = found.reason
            elif len(self._gpm) < MOST_SAMPLES:
                self._gpm.append(found)
            self._probe.start()
            self._gpm_since_s = self._clock.monotonic_s()

    def take(self) -> GpuSeries:
        """What came since the last call."""
        samples, self._samples = tuple(self._samples), []
        gpm, self._gpm = tuple(self._gpm), []
        return GpuSeries(samples=samples, gpm=gpm, lacking=self._lacking, gpm_lacking=self._gpm_lacking)


def series_from_json(answer: dict[str, Any]) -> GpuSeries:
    """A series as the process that sampled it wrote it."""

    def sample(one: dict[str, Any]) -> GpuSample:
        reasons = one["throttle_reasons"]
        return GpuSample(**one | {"throttle_reasons": None if reasons is None else tuple(reasons)})

    samples, gpm = map(sample, answer["samples"]), (GpmWindow(**one) for one in answer["gpm"])
    return GpuSeries(**answer | {"samples": tuple(samples), "gpm": tuple(gpm)})


def serve(sampling: Sampling, interval_s: float, requests: int, reply: Callable[[str], None]) -> None:
    """Sample, and answer requests, until their file descriptor closes."""
    while True:
        sampling.tick()
        readable, _, _ = select.select([requests], [], [], interval_s)
        if readable:
            asked = os.read(requests, 4096)
            if not asked:
                return
            for _ in range(asked.count(b"\n")):
                reply(json.dumps(asdict(sampling.take())))


def _reply(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Sample the GPU that the command line names."""
    uuid, interval_s, gpm_window_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    monitor = NvmlMonitor()
    try:
        sampling = Sampling(monitor, uuid, gpm_window_s=gpm_window_s, clock=SystemClock())
        serve(sampling, interval_s, 0, _reply)
    except BrokenPipeError:
        os._exit(0)  # whoever asked is gone
    finally:
        monitor.close()


if __name__ == "__main__":
    main()
