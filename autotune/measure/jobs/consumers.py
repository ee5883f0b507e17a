"""What takes micro-batches in a window: the trainer's own step, or a replay of how long a device took for it."""

import math
import time
from collections.abc import Iterator
from typing import Protocol

import torch

from trainer.config import TrainConfig
from trainer.feed import MicroBatch
from trainer.schedule import learning_rate
from trainer.step import StepResult, TrainStep
from trainer.stopwatch import Mark, mark
from trainer.waiting import DataWait


class Consumer(Protocol):
    """Takes steps of one micro-batch, as far ahead of the device as the trainer does."""

    wait: DataWait

    def step(self, loader: Iterator[MicroBatch]) -> MicroBatch:
        """Take a micro-batch and hand it to the device; returns when the step before has ended there."""
        ...

    def finish(self) -> None:
        """Wait until the device has done everything."""
        ...


class TrainingStep:
    """The trainer's step, which reads one step's numbers while the device is at the next.

    Args:
        step: Ready to run.
        config: Of the learning rate.
        device: Where it runs.
    """

    def __init__(self, step: TrainStep, config: TrainConfig, device: torch.device) -> None:
        self._step, self._config = step, config
        self._taken = 0
        self._last: StepResult | None = None
        self.wait = DataWait(lambda: mark(device))

    def step(self, loader: Iterator[MicroBatch]) -> MicroBatch:
        """Take a micro-batch and hand it to the device; returns when the step before has ended there."""
        (batch,) = self.wait.take(loader, 1)
        before, self._last = self._last, self._step.run([batch], learning_rate(self._config, self._taken))
        self.wait.gave(self._last.updated)
        self._taken += 1
        if before is not None:
            before.updated.wait()
        return batch

    def finish(self) -> None:
        """Wait until the device has done everything.

        Raises:
            ValueError: If the loss is not a number: nothing was trained then.
        """
        if self._last is not None and not math.isfinite(loss := float(self._last.loss)):
            raise ValueError(f"the loss is {loss}")


class ReplayedStep:
    """A device that takes a known time for a step. This process keeps one CPU busy meanwhile.

    So does a host that launches kernels and waits for them; it holds up no other thread of its process. What it leaves
    out: copies to the device, and memory bandwidth that a step on the host's side takes.

    Args:
        step_s: Of one micro-batch on the device.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._free_s = time.perf_counter()
        self.wait = DataWait(lambda: Mark(time.perf_counter()))
        torch.set_num_threads(1)
        self._work = torch.rand(96, 96)

    def step(self, loader: Iterator[MicroBatch]) -> MicroBatch:
        """Take a micro-batch and hand it to the device; returns when the step before has ended there."""
        (batch,) = self.wait.take(loader, 1)
        begins_s = max(time.perf_counter(), self._free_s)
        self._free_s = begins_s + self._step_s
        self.wait.gave(_Until(self._free_s))
        self._busy_until(begins_s)
        return batch

    def finish(self) -> None:
        """Wait until the device has done everything."""
        self._busy_until(self._free_s)

    def _busy_until(self, moment_s: float) -> None:
        while time.perf_counter() < moment_s:
            torch.mm(self._work, self._work)  # without the interpreter's lock, unlike a loop that looks at the clock


class _Until(Mark):
    """A moment that is known ahead."""

    def reached(self) -> bool:
        assert isinstance(self.moment, float)
        return time.perf_counter() >= self.moment
