"""The ``short_training`` job: functions of yours train for a short time.

Batches come from the real loader without a pause, as in your program: nothing is
drained, cached or compared.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from autotune.confirm.values import SubjectTrainingRequest
from autotune.subjects.jobs import load
from autotune.subjects.subject import FACTS, LoaderFacts, StepFacts
from autotune.trials.jobs.rank_group import RankGroup, join_rank_group
from autotune.workers.decide.window_time import WARM_UP_STEPS
from autotune.workers.jobs.batches import Epochs
from autotune.workers.jobs.consumers import takes_batch
from autotune.workers.jobs.step_clock import StepClock
from autotune.workers.jobs.window import WorkCounter, built
from trainer.formats.errors import BadConfig
from trainer.runtime.ranks import leave_ranks

FEWEST_STEPS = 3
"""Fewest timed steps that give a rate."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Train until the time is over.

    Args:
        measured: A ``SubjectTrainingRequest``.
        local: As for the ``window`` job.

    Returns:
        The fields of ``ShortTrainingFigures``, the same from every rank.

    Raises:
        BadConfig: If a function does not return what it should.
    """
    began_s = time.monotonic()
    request = SubjectTrainingRequest.of(measured)
    os.environ.update(local.get("environment", {}))
    directory: str = local["directory"]
    load.write_stack_after(local["limit_s"])
    load.enter(directory)
    build_step = load.resolve(request.step.function, directory)
    build_loader = None
    if request.loader is not None:
        build_loader = load.resolve(request.loader.function, directory)
    ranks = join_rank_group(request.device, local)
    training = _Training(request, ranks, began_s)
    inputs = {"directory": directory, "rendezvous": local.get("rendezvous")}
    training.run(build_step, build_loader, inputs)
    figures = training.figures()
    ranks.leave()
    leave_ranks(together=True)
    return figures


class _Training:
    """A training whose steps are timed until its time is over.

    Args:
        request: The training.
        ranks: Ranks, of which this process is one.
        began_s: Time at which the process began, by ``time.monotonic``.
    """

    def __init__(
        self, request: SubjectTrainingRequest, ranks: RankGroup, began_s: float
    ) -> None:
        self._request = request
        self._ranks = ranks
        self._ends_s = began_s + request.seconds
        self._clock = StepClock(
            ranks,
            warm_up_steps=WARM_UP_STEPS[request.device] + request.queued_batches,
            steps_to_time=self._steps_left,
        )
        self._counter: WorkCounter | None = None

    def run(
        self,
        build_step: Callable[..., Any],
        build_loader: Callable[..., Any] | None,
        inputs: dict[str, Any],
    ) -> None:
        """Train; a step without ``build_loader`` has its own data.

        ``inputs`` are further arguments, for functions that name them.
        """
        request = self._request
        arguments = {"device": request.device} | request.step.arguments

        def build() -> Any:
            step = built(build_step, arguments, inputs)
            if build_loader is None or request.loader is None:
                return step
            extra = inputs | {"device": request.device}
            loader = built(build_loader, request.loader.arguments, extra)
            return self._fed(step, loader, request.loader.function)

        self._clock.run(build, request.step.function)

    def _fed(self, step: Any, loader: Any, loader_name: str) -> Callable[[], None]:
        """Return a function that takes batches of a loader, and a step with them."""
        if not callable(step):
            raise BadConfig(
                f"{self._request.step.function} returned {type(step).__name__}",
                next_step="Return a function that takes one optimizer step.",
            )
        facts: StepFacts = getattr(step, FACTS, StepFacts())
        loader_facts: LoaderFacts = getattr(loader, FACTS, LoaderFacts())
        counter = WorkCounter(self._request.unit, facts, loader_facts)
        self._counter = counter
        batches = iter(Epochs(loader, loader_name))
        takes = takes_batch(step)

        def train() -> None:
            taken = [next(batches) for _ in range(facts.micro_batches or 1)]
            if not takes:
                step()
            elif facts.micro_batches is None:
                step(taken[0])
            else:
                step(taken)
            if self._clock.most_steps:
                counter.add_step(taken)

        train.__dict__[FACTS] = facts
        return train

    def _steps_left(self, step_s: float) -> int:
        """Return the steps that fit into the time left."""
        return int((self._ends_s - time.monotonic()) / max(step_s, 1e-6))

    def figures(self) -> dict[str, Any]:
        """Return the figures of all ranks, each of which calls this."""
        clock = self._clock
        (slowest_s,) = self._ranks.all_reduce_max(clock.end_s - clock.start_s)
        if self._counter is None:
            (units,) = self._ranks.all_reduce_sum(
                clock.micro_batches * self._request.units_per_micro_batch
            )
            units_per_s = units / slowest_s
        else:
            units_per_s = self._counter.rates(self._ranks, slowest_s)["units_per_s"]
        if clock.facts.end is not None:
            clock.facts.end()
        has_rate = clock.steps >= FEWEST_STEPS
        return {
            "tokens_per_s": units_per_s if has_rate else None,
            "steps": clock.steps,
            "seconds": round(slowest_s, 3),
            "mfu": None,
        }
