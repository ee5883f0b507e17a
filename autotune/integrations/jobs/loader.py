"""The ``own_loader`` job: a timed window of your own loader.

Its batches are consumed by your step, or by one of a given duration.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree

from autotune.integrations.values import OwnLoaderRequest
from autotune.subjects.jobs import load
from autotune.subjects.own.subject import LOOP_STEPS
from autotune.trials.jobs import footprint
from autotune.workers.jobs.batches import drain
from autotune.workers.jobs.consumers import Consumer, ReplayedStep
from autotune.workers.jobs.timed_window import WindowLength, timed_window
from trainer.data.data_wait import DataWait
from trainer.distributed.device_events import DeviceEvent, mark
from trainer.distributed.ranks import Ranks
from trainer.formats.errors import BadConfig

CACHED_BATCHES = 8
WARM_UP_STEPS = 2
PREFETCHED = 2
"""Batches that a worker holds ready, by torch's default."""
MIN_STEPS = 4


class Epochs:
    """Endless iterator over a loader, which is restarted at the end of each epoch."""

    def __init__(self, loader: Any, name: str) -> None:
        if not hasattr(loader, "__iter__"):
            what = f"{name} returned {type(loader).__name__}, which is not iterable"
            raise BadConfig(
                what,
                next_step="Return an iterable of batches, such as a torch DataLoader.",
            )
        self._loader, self._name = loader, name
        self.epoch_batches: int | None = None

    def __iter__(self) -> Iterator[Any]:
        while True:
            count = 0
            for batch in self._loader:
                count += 1
                yield batch
            if not count:
                after = (
                    ""
                    if self.epoch_batches is None
                    else f" after {self.epoch_batches} batches"
                )
                next_step = (
                    "Return an iterable that can be iterated again, such as a"
                    " DataLoader, or an endless one."
                )
                raise BadConfig(
                    f"the loader of {self._name} has no batches{after}",
                    next_step=next_step,
                )
            self.epoch_batches = count


class OwnStep:
    """Consumer that takes your own step, with the host one step ahead of the device."""

    def __init__(
        self,
        build: Callable[..., Any],
        arguments: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._device = device
        self._optimizer_steps: dict[int, int] = {}
        register_optimizer_step_post_hook(self._optimizer_stepped)
        step = build(**load.accepted(build, arguments))
        if not callable(step):
            what = f"the function for the step returned {type(step).__name__}"
            raise BadConfig(
                what,
                next_step=(
                    "Return a function that takes one optimizer step; or use"
                    " --step-time."
                ),
            )
        self._step: Callable[..., object] = step
        self._takes_batch = _takes_batch(step)
        self._before: DeviceEvent | None = None
        self.wait = DataWait(lambda: mark(device))

    def step(self, batches: Iterator[Any]) -> list[Any]:
        """Take a batch and a step.

        It returns after the device finished the previous step.
        """
        (batch,) = self.wait.take(batches, 1)
        self._optimizer_steps.clear()
        self._step(batch) if self._takes_batch else self._step()
        before, self._before = self._before, mark(self._device)
        self.wait.device_busy_until(self._before)
        if before is not None:
            before.wait()
        return [batch]

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        steps = self._optimizer_steps[id(optimizer)] = (
            self._optimizer_steps.get(id(optimizer), 0) + 1
        )
        if steps >= LOOP_STEPS:
            what = (
                f"the step took {steps} optimizer steps in one call: it is a training"
                " loop, which has its data"
            )
            raise BadConfig(
                what,
                next_step=(
                    "Let it take one step; or replay its duration with --step-time."
                ),
            )

    def finish(self) -> None:
        """Wait until the device is idle."""
        if self._before is not None:
            self._before.wait()


class ReadStep(ReplayedStep):
    """Replayed step whose loss is read.

    This process loads nothing meanwhile, as in most loops.
    """

    def step(self, loader: Iterator[Any]) -> list[Any]:
        """Take a batch and a step; return after the simulated device finished it."""
        batches = super().step(loader)
        self.finish()
        return batches


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Consume batches of a loader of yours for a timed window.

    Args:
        measured: An ``OwnLoaderRequest``.
        local: The ``directory`` to import from and the trial's time limit, ``limit_s``.

    Returns:
        The fields of ``OwnLoaderFigures``.

    Raises:
        BadConfig: If a function does not return what it should.
    """
    asked, directory = OwnLoaderRequest.of(measured), local["directory"]
    load.write_stack_after(local["limit_s"])
    load.enter(directory)
    build_step = None if asked.step is None else load.resolve(asked.step, directory)
    return window(asked, load.resolve(asked.loader, directory), build_step)


def window(
    asked: OwnLoaderRequest,
    build: Callable[..., Any],
    build_step: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Measure a window of the loader that a function builds.

    Without ``build_step``, a step is replayed.
    """
    device = (
        torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    )
    alone = Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1, device=device)
    arguments = asked.arguments | {"device": asked.device}
    if build_step is None:
        assert asked.step_time_s is not None
        consumer: Consumer = ReadStep(asked.step_time_s, lambda batch: 1.0, 1, alone)
    else:
        consumer = OwnStep(build_step, arguments, device)
    arguments["num_workers"] = asked.num_workers
    loader = Epochs(build(**load.accepted(build, arguments)), asked.loader)
    batches = iter(loader)
    if asked.cached:
        batches = itertools.cycle(list(itertools.islice(batches, CACHED_BATCHES)))
    drain(batches, PREFETCHED * asked.num_workers)
    for _ in range(WARM_UP_STEPS):
        started_s = time.perf_counter()
        (batch,) = consumer.step(batches)
        consumer.finish()
    step_s = time.perf_counter() - started_s
    window = timed_window(
        batches,
        consumer,
        alone,
        lambda batches: None,
        WindowLength(
            window_s=asked.window_s,
            step_s=step_s,
            min_steps=MIN_STEPS,
            group_steps=max(1, asked.num_workers),
        ),
    )
    return window.figures | {
        "tokens_per_s": window.figures["steps"] / window.slowest_s,
        "processes": len(footprint.private_bytes_of_children()),
        "epoch_batches": loader.epoch_batches,
        "batch_bytes": _bytes_of(batch),
    }


def _takes_batch(step: Callable[..., object]) -> bool:
    """Return whether a step can be called with a batch."""
    try:
        inspect.signature(step).bind(None)
    except (TypeError, ValueError) as error:
        # Of a builtin, whose arguments are unknown.
        return isinstance(error, ValueError)
    return True


def _bytes_of(batch: Any) -> int:
    return sum(
        one.nbytes
        for one in _pytree.tree_leaves(batch)
        if isinstance(one, torch.Tensor)
    )
