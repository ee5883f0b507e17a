"""What takes micro-batches in a window: the trainer's own step, or a replay of how long a device took for it."""

import math
import time
from collections.abc import Iterator

import torch

from trainer.build import Training
from trainer.config import TrainConfig
from trainer.feed import DataWait, MicroBatch
from trainer.optimizer import learning_rate
from trainer.parallel import Ranks
from trainer.step import StepResult
from trainer.stopwatch import Mark, mark


class TrainingStep:
    """The trainer's step, which reads one step's numbers while the device is at the next.

    Args:
        training: Ready to run.
        config: Of the learning rate.
        micro_batches: Of a step.
        device: Where it runs.
    """

    def __init__(self, training: Training, config: TrainConfig, micro_batches: int, device: torch.device) -> None:
        self._step, self._config, self._micro_batches = training.step, config, micro_batches
        self.work = training.work
        self._taken = 0
        self._last: StepResult | None = None
        self._losses: list[torch.Tensor] = []
        self.wait = DataWait(lambda: mark(device))

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches and hand them to the device; returns when the step before has ended there."""
        batches = self.wait.take(loader, self._micro_batches)
        before, self._last = self._last, self._step.run(batches, learning_rate(self._config, self._taken))
        self._losses.append(self._last.loss)
        self.wait.gave(self._last.updated)
        self._taken += 1
        if before is not None:
            before.updated.wait()
        return batches

    def finish(self) -> None:
        """Wait until the device has done everything.

        Raises:
            ValueError: If the loss is not a number: nothing was trained then.
        """
        if self._last is not None and not math.isfinite(loss := float(self._last.loss)):
            raise ValueError(f"the loss is {loss}")

    def losses(self) -> list[float]:
        """Return the loss of each step so far, warm-up included."""
        return [float(loss) for loss in self._losses]


class ReplayedStep:
    """Devices that take a known time for a micro-batch. This process keeps one CPU busy meanwhile.

    So does a host that launches kernels and waits for them; it holds up no other thread of its process. A step begins
    when all ranks have their data, as they exchange gradients. What it leaves out: copies to the device, and memory
    bandwidth that a step on the host's side takes.

    Args:
        micro_batch_s: Of a micro-batch of full rows on the device.
        row_tokens: Of a full row; narrower ones take less time, in proportion.
        micro_batches: Of a step.
        ranks: All of them.
    """

    def __init__(self, micro_batch_s: float, row_tokens: int, micro_batches: int, ranks: Ranks) -> None:
        self._micro_batch_s, self._row_tokens = micro_batch_s, row_tokens
        self._micro_batches, self._ranks = micro_batches, ranks
        self._free_s = time.perf_counter()
        self.wait = DataWait(lambda: Mark(time.perf_counter()))
        torch.set_num_threads(1)
        self._keeps_busy = torch.rand(96, 96)

    def step(self, loader: Iterator[MicroBatch]) -> list[MicroBatch]:
        """Take a step's micro-batches and hand them to the device, as far ahead of it as the trainer does."""
        batches = []
        begins_s = self._free_s
        for _ in range(self._micro_batches):
            (batch,) = self.wait.take(loader, 1)
            begins_s = self._ranks.max(max(time.perf_counter(), self._free_s))[0]
            self._free_s = begins_s + self._micro_batch_s * batch.ids_BS.shape[1] / self._row_tokens
            self.wait.gave(_Until(self._free_s))
            batches.append(batch)
        self._busy_until(begins_s)
        return batches

    def finish(self) -> None:
        """Wait until the device has done everything."""
        self._busy_until(self._free_s)

    def _busy_until(self, moment_s: float) -> None:
        while time.perf_counter() < moment_s:
            # Without the interpreter's lock, unlike a loop that looks at the clock.
            torch.mm(self._keeps_busy, self._keeps_busy)


class _Until(Mark):
    """A moment that is known ahead."""

    def reached(self) -> bool:
        assert isinstance(self.moment, float)
        return time.perf_counter() >= self.moment


Consumer = TrainingStep | ReplayedStep
"""Takes optimizer steps, as far ahead of the device as the trainer does."""
