"""Consumers of batches: a step that is built, and a simulation of a GPU's."""

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.subjects.own.subject import LOOP_STEPS
from autotune.subjects.subject import FACTS, StepFacts
from autotune.trials.jobs.rank_group import RankGroup
from trainer.formats.errors import BadConfig
from trainer.runtime.data_wait import DataWait
from trainer.runtime.device_events import DeviceEvent, mark


class Consumer(Protocol):
    """Consumer of batches, such as the trainer's step."""

    wait: DataWait
    """Timer of the waits for data, through which batches are taken."""

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take the batches of a step from a loader, begin the step, and return them."""

    def finish(self) -> None:
        """Wait until the device is idle."""


class FedStep:
    """A step that a function builds, with the host one step ahead of the device.

    Args:
        build: Function that builds the step.
        device: Device that computes the step.

    Raises:
        BadConfig: If the function returns no step, or trains itself.
    """

    def __init__(self, build: Callable[[], Any], device: torch.device) -> None:
        self._steps_by_optimizer: dict[int, int] = {}
        self._hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        step = build()
        if not callable(step):
            raise BadConfig(
                f"the function for the step returned {type(step).__name__}",
                next_step=(
                    "Return a function that takes one optimizer step; or use"
                    " --step-time."
                ),
            )
        self._step: Callable[..., object] = step
        self._device = device
        self.facts: StepFacts = getattr(step, FACTS, StepFacts())
        """Facts of the step."""
        self._takes_batch = takes_batch(step)
        self._last_end: DeviceEvent | None = None
        self.wait = DataWait(lambda: mark(device))

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take the batches of a step, launch it, and return the batches.

        This returns once the device has finished the step before.
        """
        batches = self.wait.take(loader, self.facts.micro_batches or 1)
        self._steps_by_optimizer.clear()
        if not self._takes_batch:
            self._step()
        elif self.facts.micro_batches is None:
            self._step(batches[0])
        else:
            self._step(batches)
        previous_end = self._last_end
        self._last_end = mark(self._device)
        self.wait.device_busy_until(self._last_end)
        if previous_end is not None:
            previous_end.wait()
        return batches

    def finish(self) -> None:
        """Wait until the device is idle, and stop watching optimizers.

        Raises:
            ValueError: If the step has a loss, and it is not finite.
        """
        self._hook.remove()
        if self._last_end is None:
            return
        self._last_end.wait()
        if self.facts.loss is not None:
            loss = self.facts.loss()
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss}")

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        steps = self._steps_by_optimizer.get(id(optimizer), 0) + 1
        self._steps_by_optimizer[id(optimizer)] = steps
        if steps >= LOOP_STEPS:
            raise BadConfig(
                f"the step took {steps} optimizer steps in one call: it is a training"
                " loop, which has its data",
                next_step=(
                    "Let it take one step; or replay its duration with --step-time."
                ),
            )


def takes_batch(step: Callable[..., object]) -> bool:
    """Return whether a step can be called with a batch."""
    try:
        inspect.signature(step).bind(None)
    except TypeError:
        return False
    except ValueError:
        # The arguments of a builtin are unknown.
        return True
    return True


class ReplayedStep:
    """Simulation of a GPU with a known time per micro-batch.

    This process keeps one CPU core busy, as in training. A micro-batch starts when all
    ranks have their data, as they synchronise gradients. Copies to the GPU and their
    host memory bandwidth are not simulated.

    If the host does not run ahead, it reads the loss of each step, as most loops do,
    and loads nothing meanwhile.

    Args:
        micro_batch_s: Time of a full micro-batch.
        share: Function that returns the share of ``micro_batch_s`` that a batch takes.
        micro_batches: Micro-batches of a step.
        ranks: Ranks that train together.
        host_runs_ahead: True if the host returns from a step while its last micro-batch
            is computed.
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
        ranks: RankGroup,
        *,
        host_runs_ahead: bool = True,
        now_s: Callable[[], float] = time.perf_counter,
        compute: Callable[[], object] | None = None,
    ) -> None:
        self._micro_batch_s = micro_batch_s
        self._share = share
        self._micro_batches = micro_batches
        self._ranks = ranks
        self._host_runs_ahead = host_runs_ahead
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

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take a step's micro-batches, and return them once the last one has begun.

        So the host is as far ahead of the simulated GPU as the trainer is of a real
        one. If it does not run ahead, it returns once the last one has ended.
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
        self._compute_until(begins_s if self._host_runs_ahead else self._idle_from_s)
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
