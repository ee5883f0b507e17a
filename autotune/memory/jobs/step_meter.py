"""Time and memory of each optimizer step of a subject."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.memory.jobs.peak_contents import StepRecorder
from autotune.subjects.own.subject import LOOP_STEPS
from autotune.subjects.subject import StepFacts
from autotune.trials.jobs.budget import Budget
from trainer.formats.errors import BadConfig
from trainer.runtime.device_events import DeviceEvent, mark

MOST_CALLS = 64
"""Calls without an optimizer step after which a step that accumulates gradients is an
error, and most calls to wait for the first step of an optimizer."""
QUEUED_STEPS = 2
"""Steps queued on a GPU, so that launching one overlaps computing the other."""


class EnoughSteps(BaseException):
    """Raised inside a training loop that has taken the steps of its trial.

    As a ``BaseException``, it passes every ``except Exception``.
    """


class StepMeter:
    """Time and memory of each optimizer step.

    A step is one call of the subject's function, however many optimizers step in it;
    several calls if gradients accumulate over them. A call is interrupted only if it is
    a training loop: there, a step ends at each step of the first optimizer.

    Args:
        budget: Memory budget, which records peaks.
        device: Device of the steps.
        warmup_steps: Steps to take first.
        timed_steps: Steps to take after those.
        recorder: Recorder of the contents of memory, which keeps the last step; None
            for none.
    """

    def __init__(
        self,
        budget: Budget,
        device: torch.device,
        *,
        warmup_steps: int,
        timed_steps: int,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._budget, self._device = budget, device
        self._recorder = recorder
        self._warmup_steps, self._most = warmup_steps, warmup_steps + timed_steps
        self._leader: int | None = None
        self._stepped: set[int] = set()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.trains = False
        self.facts = StepFacts()
        self.restart(LOOP_STEPS)

    def restart(self, loop_steps: int) -> None:
        """Forget all steps so far, and start the first.

        A call that takes more than ``loop_steps`` is interrupted.
        """
        self._loop_steps = loop_steps
        self._events: list[tuple[DeviceEvent, DeviceEvent]] = []
        self.calls_by_step: list[int] = []
        """Calls of each step."""
        self.kept_bytes: list[int] = []
        self.peak_bytes: list[int] = []
        self.optimizer_steps = self.calls = self._in_call = self.gradient_bytes = 0
        self._cycle = self._closed = self._accumulated = 0
        self._budget.take_step_peak()
        self._record_step()
        self._began = mark(self._device)

    def watch(self) -> Callable[[], None]:
        """Watch torch's optimizers from now on; return the function that ends it."""
        hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        make = torch.optim.Optimizer.__init__
        optimizers = self.optimizers

        def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = made  # type: ignore[assignment, method-assign]

        def end() -> None:
            torch.optim.Optimizer.__init__ = make  # type: ignore[method-assign]
            hook.remove()

        return end

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self._events)

    @property
    def done(self) -> bool:
        """True after all steps, and enough calls.

        Enough are twice the calls that it took until every optimizer with gradients had
        stepped.
        """
        return self.steps >= self._most and self.calls >= min(
            2 * self._cycle, MOST_CALLS
        )

    def step_s(self) -> list[float]:
        """Return the seconds of each step; wait until the device has taken them."""
        for _, ended in self._events[-1:]:
            ended.wait()
        return [ended.seconds_since(began) for began, ended in self._events]

    def take(self, step: Callable[[], object]) -> None:
        """Take all steps by calling a step, and evaluate as training does.

        Raises:
            BadConfig: If the step only accumulates gradients.
        """
        if self.facts.prepare is not None:
            self.facts.prepare()
            self.restart(self._loop_steps)
        while not self.done:
            if self.steps >= QUEUED_STEPS:
                # The host runs this far ahead of the device at most.
                self._events[-QUEUED_STEPS][1].wait()
            if self.facts.begin_together is not None and not self._accumulated:
                self.facts.begin_together()
                self._began = mark(self._device)
            self._call(step)
            # A step after an evaluation may need other blocks of memory. An evaluation
            # follows the warm-up, so that every trial has such a step, and the last.
            if self.facts.evaluate is not None and not self._accumulated:
                if self.steps == self._warmup_steps or self.done:
                    self.facts.evaluate()
                self._began = mark(self._device)

    def _call(self, step: Callable[[], object]) -> None:
        """Call the step once; raise ``BadConfig`` if it only accumulates gradients."""
        self._in_call, before = 0, self.optimizer_steps
        self._record_step()
        step()
        if self._recorder is not None:
            self._recorder.end_step()
        self.calls += 1
        if self.calls < MOST_CALLS and any(
            id(optimizer) not in self._stepped and _gradients(optimizer)
            for optimizer in self.optimizers
        ):
            self._cycle = self.calls + 1
        if self.optimizer_steps == before and any(map(_gradients, self.optimizers)):
            self._accumulated += 1
            if self._accumulated >= MOST_CALLS:
                raise BadConfig(
                    f"the step took no optimizer step in {self._accumulated} calls",
                    next_step=(
                        "Let a call take one; if your step catches OutOfMemoryError,"
                        " let it raise in trials."
                    ),
                )
            return
        calls = self._accumulated + 1
        self._accumulated = 0
        self._ended()
        self._close_step(calls)

    def _close_step(self, calls: int) -> None:
        """Make one step of all that ended since the last one was closed.

        They are the steps of several optimizers in one call.
        """
        closed = self._closed
        self._events[closed:] = [(self._events[closed][0], self._events[-1][1])]
        self.peak_bytes[closed:] = [max(self.peak_bytes[closed:])]
        self.kept_bytes[closed:] = self.kept_bytes[-1:]
        self.calls_by_step.append(calls)
        self._closed += 1

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note a step of an optimizer.

        Raises:
            EnoughSteps: In a loop that has taken all steps.
        """
        self._leader = self._leader or id(optimizer)
        self._stepped.add(id(optimizer))
        self.optimizers.add(optimizer)
        if id(optimizer) != self._leader:
            return
        self.optimizer_steps += 1
        self._in_call += 1
        self.gradient_bytes = sum(gradient.nbytes for gradient in _gradients(optimizer))
        self._ended()
        self._record_step_of_loop()
        is_loop = self._in_call >= max(2, self._loop_steps)
        if self.steps >= self._most and is_loop:
            self.trains = True
            raise EnoughSteps

    def _record_step(self) -> None:
        """Record the next step, and forget those before it."""
        if self._recorder is not None:
            self._recorder.begin_step()

    def _record_step_of_loop(self) -> None:
        """Record the next step of a training loop; otherwise, the call is one step."""
        if self._recorder is None or self._loop_steps > self._most:
            return
        if self.steps < self._most:
            self._recorder.begin_step()
        else:
            self._recorder.end_step()

    def _ended(self) -> None:
        ended = mark(self._device)
        self._events.append((self._began, ended))
        self.peak_bytes.append(self._budget.take_step_peak())
        self.kept_bytes.append(self._budget.kept_bytes())
        self._began = ended


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
