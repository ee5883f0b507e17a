"""Timing of a step that has its own data, from inside.

It is a training loop, or a step that is called without a batch.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

from autotune.memory.jobs.step_meter import EnoughSteps
from autotune.subjects.own.subject import LOOP
from autotune.subjects.subject import FACTS, StepFacts
from autotune.trials.jobs.rank_group import RankGroup
from trainer.formats.errors import BadConfig
from trainer.runtime.device_events import DeviceEvent, mark

MOST_ACCUMULATED = 16
"""Calls without a step of an optimizer of torch after which there is none: gradients
may accumulate over some."""


class StepClock:
    """Times optimizer steps, and ends a loop after enough of them.

    All ranks time the same number of steps.

    Args:
        ranks: Ranks, of which this process is one.
        warm_up_steps: Steps before the timed ones, at least 2. The last one shows the
            speed of steps.
        steps_to_time: Returns how many steps to time, from the seconds of one.
    """

    def __init__(
        self,
        ranks: RankGroup,
        *,
        warm_up_steps: int,
        steps_to_time: Callable[[float], int],
    ) -> None:
        self._ranks = ranks
        self._warm_up_steps = max(2, warm_up_steps)
        self._steps_to_time = steps_to_time
        self._leader: int | None = None
        self._in_loop = True
        self._has_stepped_in_call = False
        self._previous: DeviceEvent | None = None
        self._before_last_s = 0.0
        self._calls = 0
        self._calls_before = 0
        self._waited_s = 0.0
        self._waited_before_s = 0.0
        self.facts = StepFacts()
        """Facts of the step; those of a loop are unknown while it is built."""
        self.warm_up = 0
        """Steps so far that are not timed."""
        self.steps = 0
        """Timed steps so far."""
        self.most_steps = 0
        """Steps to time; 0 during the warm-up."""
        self.start_s = 0.0
        """Start of the timed steps, by ``time.monotonic``."""
        self.end_s = 0.0
        """End of the timed steps, by ``time.monotonic``."""

    @property
    def micro_batches(self) -> float:
        """Micro-batches of the timed steps on this rank.

        A loop takes as many in each optimizer step as its facts say, or one.
        """
        calls = self._calls - self._calls_before or self.steps
        return calls * (self.facts.micro_batches or 1)

    @property
    def waited_s(self) -> float:
        """Time of the timed steps that the host spent in ``next`` of DataLoaders."""
        return self._waited_s - self._waited_before_s

    def run(self, build: Callable[[], Any], name: str) -> None:
        """Build a step, and take steps until enough are timed.

        Args:
            build: Builds the step, or trains.
            name: Name of the function, for messages.

        Raises:
            BadConfig: If the loop ends before.
        """
        hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        try:
            with contextlib.suppress(EnoughSteps), self._watched_loaders():
                step = build()
                self._take(step)
                raise _ended_early(name, self.warm_up + self.steps)
        finally:
            hook.remove()

    def _take(self, step: Any) -> None:
        """Call a step until enough are timed; a loop is called once.

        It returns at once if the function that built it has trained.
        """
        if not callable(step):
            return
        self.facts = getattr(step, FACTS, StepFacts())
        if self.facts.prepare is not None:
            self.facts.prepare()
        # Steps of the function that built it do not count.
        self.warm_up = self.steps = self.most_steps = 0
        self._in_loop = hasattr(step, LOOP)
        if self._in_loop:
            step()
            return
        while True:
            self._has_stepped_in_call = False
            step()
            self._calls += 1
            # A step without an optimizer of torch counts by its calls.
            uses_none = self._leader is None and self._calls > MOST_ACCUMULATED
            if self._has_stepped_in_call or uses_none:
                self._tick()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._leader is None:
            self._leader = id(optimizer)
        if id(optimizer) != self._leader:
            return
        self._has_stepped_in_call = True
        if self._in_loop:
            self._tick()

    def _tick(self) -> None:
        """Note the end of a step; raise ``EnoughSteps`` after the last one."""
        event = mark(self._ranks.device)
        if self._previous is not None:
            # The host runs one step ahead of the device at most.
            self._previous.wait()
        self._previous = event
        if self.most_steps:
            self.steps += 1
            if self.steps >= self.most_steps:
                event.wait()
                self.end_s = time.monotonic()
                raise EnoughSteps
            return
        self.warm_up += 1
        if self.warm_up == self._warm_up_steps - 1:
            event.wait()
            self._before_last_s = time.monotonic()
        elif self.warm_up >= self._warm_up_steps:
            event.wait()
            self._begin(time.monotonic() - self._before_last_s)

    def _begin(self, step_s: float) -> None:
        """Begin the timed steps, of which all ranks take the same number."""
        (slowest_s,) = self._ranks.all_reduce_max(step_s)
        most_steps = max(1, self._steps_to_time(slowest_s))
        self.most_steps = round(self._ranks.all_reduce_max(most_steps)[0])
        self._calls_before = self._calls
        self._waited_before_s = self._waited_s
        self.start_s = time.monotonic()

    @contextlib.contextmanager
    def _watched_loaders(self) -> Iterator[None]:
        """Count the time in ``next`` of DataLoaders while the block runs."""
        iterator: Any = dataloader._BaseDataLoaderIter
        take = iterator.__next__

        def timed(loader: Any) -> Any:
            began_s = time.monotonic()
            try:
                return take(loader)
            finally:
                self._waited_s += time.monotonic() - began_s

        iterator.__next__ = timed
        try:
            yield
        finally:
            iterator.__next__ = take


def _ended_early(name: str, steps: int) -> BadConfig:
    return BadConfig(
        f"{name} ended after {steps} optimizer steps, before it was timed",
        next_step=(
            "Let it train for longer: it is stopped. Or let it return a function that"
            " takes one optimizer step."
        ),
    )
