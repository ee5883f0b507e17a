"""Consumers of batches: the trainer's step, and a simulation of a GPU's."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.build import Training
from trainer.config.train_config import TrainConfig
from trainer.data.data_wait import DataWait
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.device_events import DeviceEvent, mark
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.ranks import Ranks
from trainer.distributed.step import StepResult


class Consumer(Protocol):
    """Consumer of batches, such as the trainer's step."""

    wait: DataWait
    """Timer of the waits for data, through which batches are taken."""

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take the batches of a step from a loader, begin the step, and return them."""

    def finish(self) -> None:
        """Wait until the device is idle."""


class TrainingStep:
    """The trainer's step, with the host one step ahead of the device.

    Args:
        training: Training whose step is taken.
        config: Trainer settings.
        micro_batches: Micro-batches of a step.
        device: Device that computes the step.
    """

    def __init__(
        self,
        training: Training,
        config: TrainConfig,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        self._step = training.step
        self._module = training.module
        self.work = training.work
        """Work of the model, from which FLOPs are counted."""
        self._config = config
        self._micro_batches = micro_batches
        self._steps_taken = 0
        self._last_result: StepResult | None = None
        self.losses: list[torch.Tensor] = []
        """Loss of each step so far, warm-up included."""
        self.wait = DataWait(lambda: mark(device))

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches, launch the step, and return the micro-batches.

        This returns once the device has finished the step before.
        """
        batches = self.wait.take(loader, self._micro_batches)
        if not self._steps_taken:
            # Sets the fixed number of attention segments before the first step.
            self._module.fixed_sizes.expect_documents(batches[0])
        previous = self._last_result
        result = self._step.run(batches, learning_rate(self._config, self._steps_taken))
        self._last_result = result
        self.losses.append(result.loss)
        self.wait.device_busy_until(result.updated)
        self._steps_taken += 1
        if previous is not None:
            previous.updated.wait()
        return batches

    def finish(self) -> None:
        """Wait until the device is idle.

        Raises:
            ValueError: If the loss is not finite.
        """
        if self._last_result is None:
            return
        # Reading the loss waits for the device.
        loss = float(self._last_result.loss)
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss}")


class ReplayedStep:
    """Simulation of a GPU with a known time per micro-batch.

    This process keeps one CPU core busy, as in training. A micro-batch starts when all
    ranks have their data, as they synchronise gradients. Copies to the GPU and their
    host memory bandwidth are not simulated.

    Args:
        micro_batch_s: Time of a full micro-batch.
        share: Function that returns the share of ``micro_batch_s`` that a batch takes.
        micro_batches: Micro-batches of a step.
        ranks: Ranks that train together.
        now_s: Clock of the host, in seconds.
        compute: Function that computes for a moment, and is called again and again
            while the host waits for the simulated GPU. None is a small matmul, for
            which torch's number of threads is set to 1.
    """

    def __init__(
        self,
        micro_batch_s: float,
        share: Callable[[Any], float],
        micro_batches: int,
        ranks: Ranks,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        compute: Callable[[], object] | None = None,
    ) -> None:
        self._micro_batch_s = micro_batch_s
        self._share = share
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._now_s = now_s
        self._idle_from_s = now_s()
        """Time at which the simulated GPU has computed all micro-batches so far."""
        self.wait = DataWait(lambda: DeviceEvent(now_s()), now_s=now_s)
        if compute is None:
            # A training process keeps one core busy. A matmul of this size takes far
            # less than a millisecond, and so ends close to the time that is waited for.
            # It releases the GIL, unlike a loop that reads the clock.
            torch.set_num_threads(1)
            matrix = torch.rand(96, 96)
            compute = functools.partial(torch.mm, matrix, matrix)
        self._compute = compute

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches, and return them once the last one has begun.

        So the host is as far ahead of the simulated GPU as the trainer is of a real
        one.
        """
        batches = []
        begins_s = self._idle_from_s
        for _ in range(self._micro_batches):
            (batch,) = self.wait.take(loader, 1)
            ready_s = max(self._now_s(), self._idle_from_s)
            (begins_s,) = self._ranks.all_reduce_max(ready_s)
            self._idle_from_s = begins_s + self._micro_batch_s * self._share(batch)
            end_of_work = _KnownEvent(self._idle_from_s, now_s=self._now_s)
            self.wait.device_busy_until(end_of_work)
            batches.append(batch)
        self._compute_until(begins_s)
        return batches

    def finish(self) -> None:
        """Wait until the device is idle."""
        self._compute_until(self._idle_from_s)

    def _compute_until(self, end_s: float) -> None:
        while self._now_s() < end_s:
            self._compute()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownEvent(DeviceEvent):
    """Device event whose time on the host clock is known in advance."""

    now_s: Callable[[], float]
    """Clock of the host, in seconds."""

    def reached(self) -> bool:
        assert isinstance(self.moment, float)
        return self.now_s() >= self.moment
