"""A time series of what GPUs do, taken in the background while something else is measured."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from autotune.core.hardware import GpuSample, Unavailable
from autotune.measure.gpm import MIN_INTERVAL_S
from autotune.measure.nvml import GpuMonitor


class GpuSampler:
    """Samples GPUs in one background thread of this process, between ``start`` and ``stop`` or over a ``with`` block.

    Args:
        monitor: Where the samples come from.
        uuids: The GPUs.
        interval_s: Time between samples of one GPU, at least 0.1.

    Raises:
        ValueError: If the interval is shorter.
    """

    def __init__(self, monitor: GpuMonitor, uuids: Sequence[str], *, interval_s: float = MIN_INTERVAL_S) -> None:
        if interval_s < MIN_INTERVAL_S:
            raise ValueError(f"GPUs cannot be sampled every {interval_s} s: use at least {MIN_INTERVAL_S} s")
        self._monitor = monitor
        self._interval_s = interval_s
        self._series: dict[str, list[GpuSample]] = {uuid: [] for uuid in uuids}
        self._reasons: dict[str, str] = {}
        self._finish = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-sampler")
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Begin to sample; a sampler runs once."""
        assert self._running is None, "a sampler runs once"
        self._running = self._pool.submit(self._loop)

    def stop(self) -> dict[str, tuple[GpuSample, ...]]:
        """Stop, and give each GPU's samples in order of time; a GPU that gave none has an empty series."""
        self._finish.set()
        self._pool.shutdown()
        if self._running is not None:
            self._running.result()  # raises what the thread raised, which can only be a bug
        return {uuid: tuple(samples) for uuid, samples in self._series.items()}

    def reasons(self) -> dict[str, str]:
        """Why samples are missing: the last reason of each GPU that failed to give one."""
        return dict(self._reasons)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _loop(self) -> None:
        while True:
            for uuid, samples in self._series.items():
                sample = self._monitor.sample(uuid)
                if isinstance(sample, Unavailable):
                    self._reasons[uuid] = sample.reason
                else:
                    samples.append(sample)
            if self._finish.wait(self._interval_s):
                return
