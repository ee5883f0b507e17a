"""The ``window`` job: a timed window of training.

A loader feeds the step of the same subject, or a simulated one of a given duration.
Batches come from the loader's workers, or are cached.
"""

import functools
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autotune.evidence.workers import BATCHES
from autotune.subjects.jobs import load
from autotune.subjects.subject import FACTS, LoaderFacts, StepFacts
from autotune.trials.jobs.rank_group import RankGroup, join_rank_group
from autotune.workers.decide.window_time import WARM_UP_STEPS
from autotune.workers.jobs.batches import Epochs, bytes_of, cached, drain
from autotune.workers.jobs.consumers import Consumer, FedStep, ReplayedStep
from autotune.workers.jobs.step_clock import StepClock
from autotune.workers.jobs.timed_window import (
    WindowLength,
    figures_of_all_ranks,
    timed_window,
)
from autotune.workers.values import CallTable, WindowRequest
from trainer.runtime.ranks import leave_ranks

DEFAULT_PREFETCH_FACTOR = 2
"""Batches that a worker holds ready, by torch's default."""
Build = Callable[..., Any]
_OTHER_WORK = frozenset({"units", "padded_units", "model_flops", "share"})
"""Names in the work of a batch that are no units."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Train all ranks for a timed window.

    Args:
        measured: A ``WindowRequest``; its ``interleaved_with``, ``source_sha256`` and
            ``storage`` only distinguish windows.
        local: Of your code, the ``directory`` to import from, and the trial's time
            limit ``limit_s``. ``inputs`` are further arguments of the functions that
            depend on this machine, such as the directory of a dataset. With several
            ranks also ``environment``, torchrun's environment variables, and
            ``rendezvous``, the file through which the ranks connect.

    Returns:
        Fields of ``WindowFigures``, the same from every rank.

    Raises:
        BadConfig: If a function does not return what it should.
    """
    request = WindowRequest.of(measured)
    os.environ.update(local.get("environment", {}))
    directory = local.get("directory")
    if directory is not None:
        load.write_stack_after(local["limit_s"])
        load.enter(directory)
    build_step = None
    if request.step is not None:
        build_step = load.resolve(request.step.function, directory or "")
    build_loader = None
    if request.loader is not None:
        build_loader = load.resolve(request.loader.function, directory or "")
    inputs = {
        **local.get("inputs", {}),
        "directory": directory,
        "rendezvous": local.get("rendezvous"),
    }
    # After that, as importing your code may set variables that CUDA reads when it
    # starts.
    ranks = join_rank_group(request.device, local)
    if directory is not None:
        # Windows of other settings begin with the same weights and the same choices.
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
    figures = measure(request, ranks, build_loader, build_step, inputs)
    ranks.leave()
    # The group of the step, if it has one.
    leave_ranks(together=True)
    return figures


def measure(
    request: WindowRequest,
    ranks: RankGroup,
    build_loader: Build | None,
    build_step: Build | None,
    inputs: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure a window, and return the fields of ``WindowFigures``.

    Args:
        request: The window.
        ranks: Ranks, of which this process is one.
        build_loader: Function that builds the loader; None if the step has its own
            data.
        build_step: Function that builds the step; None replays one.
        inputs: Further arguments of both functions, for those that take them.
    """
    extra = {**inputs, "round_number": request.round}
    if request.loader is None or build_loader is None:
        assert request.step is not None and build_step is not None
        return _measure_self_fed(request, request.step, ranks, build_step, extra)
    fed_step = None
    if request.step is not None and build_step is not None:
        arguments = {"device": request.device} | request.step.arguments
        build = functools.partial(built, build_step, arguments, extra)
        fed_step = FedStep(build, ranks.device)
    # A loader that takes any arguments hands them on to one that knows no device.
    loader_extra = extra | {"device": request.device}
    loader = built(build_loader, request.loader.arguments, loader_extra)
    loader_facts: LoaderFacts = getattr(loader, FACTS, LoaderFacts())
    facts = StepFacts() if fed_step is None else fed_step.facts
    consumer: Consumer
    if fed_step is None:
        micro_batches = loader_facts.micro_batches or 1
        consumer = _replayed_step(request, loader_facts, micro_batches, ranks)
    else:
        micro_batches = facts.micro_batches or 1
        consumer = fed_step
    workers: int = request.loader.arguments.get("num_workers", 0)
    prefetch_factor: int = request.loader.arguments.get(
        "prefetch_factor", DEFAULT_PREFETCH_FACTOR
    )
    epochs = Epochs(loader, request.loader.function)
    batches = iter(epochs)
    if request.cached:
        batches = cached(batches, enough_s=request.window_s)
    drained = drain(batches, workers * prefetch_factor)
    warm_up_steps = WARM_UP_STEPS[request.device]
    step_s, last_batches = _warm_up(consumer, batches, warm_up_steps)
    length = WindowLength(
        window_s=request.window_s,
        step_s=step_s,
        min_steps=request.min_steps,
        # Workers deliver in bursts of a batch each. A window must have whole bursts, so
        # its steps come in groups that take as many from every worker.
        group_steps=max(1, workers // math.gcd(workers, micro_batches)),
    )
    counter = WorkCounter(request.unit, facts, loader_facts)
    window = timed_window(batches, consumer, ranks, counter.add_step, length)
    figures = window.figures | counter.rates(ranks, window.slowest_s)
    batch_bytes, epoch_batches = ranks.all_reduce_max(
        bytes_of(last_batches[0]), epochs.epoch_batches or 0
    )
    if facts.losses is not None:
        figures["losses"] = list(facts.losses())
    if facts.end is not None:
        facts.end()
    return figures | {
        "optimizer_steps": warm_up_steps + figures["steps"],
        "discarded_batches": drained + warm_up_steps * micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "local_ranks": ranks.world_size,
        "batch_bytes": round(batch_bytes),
        "epoch_batches": round(epoch_batches) or None,
    }


def _measure_self_fed(
    request: WindowRequest,
    step: CallTable,
    ranks: RankGroup,
    build_step: Build,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure a window of a step that has its own data.

    Arguments are as for ``measure``; ``step`` is the call of ``build_step``.
    """
    clock = StepClock(
        ranks,
        warm_up_steps=WARM_UP_STEPS[request.device] + request.queued_batches,
        steps_to_time=lambda step_s: max(
            request.min_steps, math.ceil(request.window_s / max(step_s, 1e-6))
        ),
    )
    arguments = {"device": request.device} | step.arguments
    clock.run(lambda: built(build_step, arguments, extra), step.function)
    window = figures_of_all_ranks(
        ranks,
        waited_s=clock.waited_s,
        steps=clock.steps,
        start_s=clock.start_s,
        end_s=clock.end_s,
        read_bytes=None,
    )
    (micro_batches,) = ranks.all_reduce_sum(clock.micro_batches)
    units_per_s = micro_batches * request.units_per_micro_batch / window.slowest_s
    figures = window.figures
    if clock.facts.losses is not None:
        figures["losses"] = list(clock.facts.losses())
    if clock.facts.end is not None:
        clock.facts.end()
    return figures | {
        "unit": request.unit,
        "units_per_s": units_per_s,
        "padded_units_per_s": units_per_s,
        "optimizer_steps": clock.warm_up + clock.steps,
        "discarded_batches": clock.warm_up,
        "gradient_accumulation_steps": clock.facts.micro_batches or 1,
        "local_ranks": ranks.world_size,
    }


def built(build: Build, arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """Call a function that builds a step or a loader.

    Of ``extra`` it gets those that are named among its parameters, even if it takes any
    argument; ``arguments`` prevail.
    """
    return build(**(load.named(build, extra) | load.accepted(build, arguments)))


def _replayed_step(
    request: WindowRequest, facts: LoaderFacts, micro_batches: int, ranks: RankGroup
) -> ReplayedStep:
    # The request has a step, or the time of one.
    assert request.replayed_step_s is not None
    work = facts.work

    def share(batch: Any) -> float:
        return 1.0 if work is None else work(batch).get("share", 1.0)

    return ReplayedStep(
        request.replayed_step_s,
        share,
        micro_batches,
        ranks,
        host_runs_ahead=facts.host_runs_ahead,
    )


def _warm_up(
    consumer: Consumer, batches: Iterator[Any], steps: int
) -> tuple[float, list[Any]]:
    """Take steps one by one; return the seconds and the batches of the last one."""
    step_s = math.nan
    taken: list[Any] = []
    for _ in range(steps):
        started_s = time.perf_counter()
        taken = consumer.step(batches)
        consumer.finish()
        step_s = time.perf_counter() - started_s
    return step_s, taken


class WorkCounter:
    """Work of one rank's steps: in units if it is counted, else in batches.

    Args:
        unit: Name of the units.
        step: Facts of the step, whose count comes first.
        loader: Facts of the loader.
    """

    def __init__(self, unit: str, step: StepFacts, loader: LoaderFacts) -> None:
        self._work = step.work or loader.work
        self._unit = unit
        self._units = 0.0
        self._padded_units = 0.0
        self._batches = 0
        self._counts_units = False
        self._other_units: dict[str, float] = {}
        self._model_flops = 0.0
        self._counts_padding = False
        self._counts_flops = False

    def add_step(self, batches: list[Any]) -> None:
        """Add the work of a step."""
        self._batches += len(batches)
        if self._work is None:
            return
        for batch in batches:
            self._add_batch(self._work(batch))

    def _add_batch(self, work: Mapping[str, float]) -> None:
        units = work.get("units", work.get(self._unit))
        if units is not None:
            padded_units = work.get("padded_units", work.get(f"padded_{self._unit}"))
            self._counts_units = True
            self._units += units
            self._padded_units += units if padded_units is None else padded_units
            self._counts_padding = padded_units is not None
        if "model_flops" in work:
            self._counts_flops = True
            self._model_flops += work["model_flops"]
        for name, amount in work.items():
            is_unit = name not in _OTHER_WORK and not name.startswith("padded_")
            if is_unit and name != self._unit:
                self._other_units[name] = self._other_units.get(name, 0.0) + amount

    def rates(self, ranks: RankGroup, window_s: float) -> dict[str, Any]:
        """Return the rates of all ranks together, each of which calls this."""
        if not self._counts_units:
            self._units = self._padded_units = float(self._batches)
        units, padded_units, model_flops, *others = ranks.all_reduce_sum(
            self._units,
            self._padded_units,
            self._model_flops,
            *self._other_units.values(),
        )
        return {
            "unit": self._unit if self._counts_units else BATCHES,
            "units_per_s": units / window_s,
            "padded_units_per_s": padded_units / window_s,
            "counts_padding": self._counts_padding,
            "model_flops_per_s": model_flops / window_s if self._counts_flops else None,
            "other_units_per_s": {
                name: amount / window_s
                for name, amount in zip(self._other_units, others, strict=True)
            },
        }
