"""The ``own_step`` job: optimizer steps of your own code, under a memory budget."""

import contextlib
import random
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.integrations.values import STEPS, OwnStepRequest
from autotune.subjects.jobs import load
from autotune.subjects.own.subject import LOOP, LOOP_STEPS
from autotune.trials.jobs.budget import Budget, enforce
from autotune.trials.jobs.cpu_allocators import keep_one_arena
from trainer.distributed.ranks import Ranks
from trainer.formats.errors import BadConfig
from trainer.health.failures import out_of_memory
from trainer.record.process_memory import status_bytes

_LARGE_BLOCK_BYTES = 32 * 1024
"""Blocks that go back to the kernel at once: samples of a batch are small, and would
leave holes between others."""
MOST_CALLS = 64
"""Calls without an optimizer step after which a step that accumulates gradients is an
error, and most calls to wait for the first step of an optimizer."""


class EnoughSteps(BaseException):
    """Raised inside a training loop that has taken the steps of its trial.

    As a ``BaseException``, it passes every ``except Exception``.
    """


class StepMeter:
    """Time and memory of each optimizer step of your code.

    A step is one call of your function, however many optimizers step in it; several
    calls if gradients accumulate over them. A call is interrupted only if it is a
    training loop: there, a step ends at each step of the first optimizer.
    """

    def __init__(self, budget: Budget, device: torch.device, steps: int) -> None:
        self._budget, self._device, self._most = budget, device, steps
        self._leader: int | None = None
        self._stepped: set[int] = set()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.trains = False
        self.restart(steps)

    def restart(self, loop_steps: int) -> None:
        """Forget all steps so far, and start the first.

        A call that takes more than ``loop_steps`` is interrupted.
        """
        self._loop_steps = loop_steps
        self.step_s: list[float] = []
        self.kept_bytes: list[int] = []
        self.peak_bytes: list[int] = []
        self.optimizer_steps = self.calls = self._in_call = self.gradient_bytes = 0
        self._cycle = self._closed = self._accumulated = 0
        self._budget.take_step_peak()
        self._began_s = time.perf_counter()

    @property
    def done(self) -> bool:
        """True after all steps, and enough calls.

        Enough are twice the calls that it took until every optimizer with gradients had
        stepped.
        """
        return len(self.step_s) >= self._most and self.calls >= min(
            2 * self._cycle, MOST_CALLS
        )

    def call(self, step: Callable[[], object]) -> None:
        """Call your step once; raise ``BadConfig`` if it only accumulates gradients."""
        self._in_call, before = 0, self.optimizer_steps
        step()
        self.calls += 1
        if self.calls < MOST_CALLS and any(
            id(one) not in self._stepped and _gradients(one) for one in self.optimizers
        ):
            self._cycle = self.calls + 1
        if self.optimizer_steps == before and any(map(_gradients, self.optimizers)):
            self._accumulated += 1
            if self._accumulated >= MOST_CALLS:
                what = f"the step took no optimizer step in {self._accumulated} calls"
                next_step = (
                    "Let a call take one; if your step catches OutOfMemoryError, let it"
                    " raise in trials."
                )
                raise BadConfig(what, next_step=next_step)
            return
        self._accumulated = 0
        self._ended()
        closed = self._closed
        self.step_s[closed:] = [sum(self.step_s[closed:])]
        self.peak_bytes[closed:] = [max(self.peak_bytes[closed:])]
        self.kept_bytes[closed:] = self.kept_bytes[-1:]
        self._closed += 1

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note a step of an optimizer.

        Raises:
            EnoughSteps: In a loop that has taken all steps.
        """
        self._leader = self._leader or id(optimizer)
        self._stepped.add(id(optimizer))
        self.optimizers.add(optimizer)
        if id(optimizer) == self._leader:
            self.optimizer_steps += 1
            self._in_call += 1
            self.gradient_bytes = sum(one.nbytes for one in _gradients(optimizer))
            self._ended()
            if len(self.step_s) >= self._most and self._in_call >= max(
                2, self._loop_steps
            ):
                self.trains = True
                raise EnoughSteps

    def _ended(self) -> None:
        self._wait()
        self.step_s.append(time.perf_counter() - self._began_s)
        self.peak_bytes.append(self._budget.take_step_peak())
        self.kept_bytes.append(self._budget.kept_bytes())
        self._began_s = time.perf_counter()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        one.grad
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None
    ]


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Build a step of yours, and take optimizer steps, in a fresh process.

    Args:
        measured: An ``OwnStepRequest``.
        local: The ``directory`` to import from, the trial's time limit ``limit_s``, and
            ``device_used_before_bytes``, NVML's figure from before the trial, or None.

    Returns:
        The fields of ``OwnStepFigures``.

    Raises:
        BadConfig: If the function is no builder of steps.
    """
    asked = OwnStepRequest.of(measured)
    load.write_stack_after(local["limit_s"])
    if asked.device == "cpu":
        keep_one_arena()
    load.enter(local["directory"])
    build = load.resolve(asked.step, local["directory"])
    device = (
        torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    )
    alone = Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1, device=device)
    budget = enforce(
        asked.memory_budget_bytes,
        alone,
        local.get("device_used_before_bytes"),
        clean=True,
        large_block_bytes=_LARGE_BLOCK_BYTES,
    )
    random.seed(0)  # your code's random choices are the same in every trial
    np.random.seed(0)
    torch.manual_seed(0)
    return figures_of(asked, build, budget, device)


def figures_of(
    asked: OwnStepRequest,
    build: Callable[..., Any],
    budget: Budget,
    device: torch.device,
) -> dict[str, Any]:
    """Take the steps of a trial.

    Returns:
        The fields of ``OwnStepFigures``.

    Raises:
        OutOfMemoryError: If the steps exceed the memory budget.
    """
    meter, before = StepMeter(budget, device, asked.steps), set(sys.modules)
    try:
        take_steps(meter, build, asked)
    except (Exception, SystemExit) as error:
        raise _explained(error, asked.step) from error
    budget.check()
    return {
        "step_s": meter.step_s,
        "peak_bytes": budget.peak_bytes(),
        "non_pytorch_bytes": budget.non_pytorch_bytes,
        "step_peak_bytes": meter.peak_bytes,
        "kept_bytes": meter.kept_bytes,
        "optimizer_steps": meter.optimizer_steps,
        "trains": meter.trains,
        "gradient_bytes": meter.gradient_bytes,
        "host_peak_bytes": max(status_bytes("VmHWM"), budget.host_peak_bytes),
        "imported": [name for name in sys.modules if name not in before],
    }


def take_steps(
    meter: StepMeter, build: Callable[..., Any], asked: OwnStepRequest
) -> None:
    """Take the steps of a trial.

    Raises:
        BadConfig: If the function neither returns a step nor trains for as many steps.
    """
    hook = register_optimizer_step_post_hook(meter.optimizer_stepped)
    make = torch.optim.Optimizer.__init__

    def made(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        meter.optimizers.add(optimizer)

    torch.optim.Optimizer.__init__ = made  # type: ignore[assignment, method-assign]
    try:
        with contextlib.suppress(EnoughSteps):
            meter.restart(asked.steps)
            step = build(
                **load.accepted(build, asked.arguments | {"device": asked.device})
            )
            if callable(step):
                if any((load.parameters_of(step) or {}).values()):
                    what = (
                        f"the step of {asked.step} requires an argument, which a probe"
                        " does not have"
                    )
                    raise BadConfig(
                        what,
                        next_step=(
                            "Give it a default: the largest batch that can occur."
                        ),
                    )
                meter.restart(
                    asked.steps if hasattr(step, LOOP) else max(asked.steps, LOOP_STEPS)
                )
                while not meter.done:
                    meter.call(step)
            elif len(meter.step_s) < STEPS:
                what = (
                    f"{asked.step} returned {type(step).__name__} after"
                    f" {len(meter.step_s)} optimizer steps"
                )
                next_step = (
                    "Return a function that takes one optimizer step, or train for"
                    f" {STEPS} steps."
                )
                raise BadConfig(what, next_step=next_step)
            else:
                meter.trains = True
    finally:
        torch.optim.Optimizer.__init__ = make  # type: ignore[method-assign]
        hook.remove()


def _explained(error: BaseException, name: str) -> BaseException:
    """Return an error of your code as the trial reports it.

    It is out of memory wherever that was its cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if out_of_memory(cause) is not None:
            return cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, SystemExit):
        what = f"{name} ended its process: sys.exit({error.code!r})"
        return BadConfig(
            what, next_step="Let it return, or raise an error that says what is wrong."
        )
    return error
