"""The ``step`` job: optimizer steps of a subject, under a memory budget."""

import contextlib
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from autotune.memory.jobs.peak_contents import StepRecorder
from autotune.memory.jobs.step_meter import EnoughSteps, StepMeter
from autotune.memory.values import StepRequest
from autotune.subjects.jobs import load
from autotune.subjects.own.subject import LOOP, LOOP_STEPS
from autotune.subjects.subject import StepFacts
from autotune.trials.jobs.budget import (
    Budget,
    enforce,
    lift_memory_limit,
    reject_mig_slice,
)
from autotune.trials.jobs.cpu_allocators import keep_one_arena
from autotune.trials.jobs.rank_group import RankGroup, join_rank_group
from trainer.formats.errors import BadConfig
from trainer.formats.process_status import status_bytes
from trainer.runtime.out_of_memory import out_of_memory
from trainer.runtime.ranks import Ranks, warm_up_libraries

FEWEST_STEPS = 3
"""Optimizer steps that a training function must take if it is not stopped."""
_LARGE_BLOCK_BYTES = 32 * 1024
"""Blocks that go back to the kernel at once: samples of a batch are small, and would
leave holes between others."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Build a step, and take optimizer steps together with the other ranks.

    Args:
        measured: A ``StepRequest``.
        local: The trial's time limit ``limit_s``; ``device_used_before_bytes``, NVML's
            figures from before the trial by local rank, or None; the ``directory`` to
            import from, if the source is yours; and ``environment`` and ``rendezvous``
            for several ranks.

    Returns:
        The fields of ``StepFigures``, the same on every rank.

    Raises:
        BadConfig: If the function builds no step.
    """
    request = StepRequest.of(measured)
    build, group, arguments = begin(request, local)
    budget = _enforce_budget(
        request,
        group,
        local.get("device_used_before_bytes"),
        # What training opens before its model stays open, as there. All other code
        # opens its libraries as it goes, and must find none of ours.
        clean=request.device == "cpu" or not hasattr(build, "before_budget"),
    )
    return figures_of(request, build, arguments, budget, group)


def begin(
    request: StepRequest, local: dict[str, Any]
) -> tuple[Callable[..., Any], RankGroup, dict[str, Any]]:
    """Join the other ranks, and import the function that builds the step.

    Returns:
        The function, the ranks, and the function's arguments.
    """
    load.write_stack_after(local["limit_s"])
    if request.device == "cpu":
        keep_one_arena()
    os.environ.update(local.get("environment", {}))
    directory = local.get("directory")
    if directory is not None:
        load.enter(directory)
    build = load.resolve(request.function, directory or "")
    arguments = request.arguments | {"device": request.device}
    # For functions of this project, which name them.
    internal = {"directory": directory, "rendezvous": local.get("rendezvous")}
    before_budget = getattr(build, "before_budget", None)
    if before_budget is not None:
        internal["opened"] = before_budget(
            **load.accepted(before_budget, arguments),
            **load.named(before_budget, internal),
        )
    arguments |= load.named(build, internal)
    # After that, as it may set variables that CUDA reads when it starts.
    group = join_rank_group(request.device, local)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    reject_mig_slice(group.device)
    if before_budget is None:
        # Memory that libraries take when they are opened is not the model's.
        warm_up_libraries(
            Ranks(
                rank=0,
                local_rank=0,
                local_world_size=1,
                world_size=1,
                device=group.device,
            )
        )
    random.seed(0)  # random choices of the step are the same in every trial
    np.random.seed(0)
    torch.manual_seed(0)
    return build, group, arguments


def _enforce_budget(
    request: StepRequest,
    group: RankGroup,
    used_by_rank_bytes: Sequence[int] | None,
    *,
    clean: bool,
) -> Budget:
    """Limit the memory of this rank, and measure it from here on.

    Args:
        request: Request with the memory budget.
        group: Ranks, of which this process is one.
        used_by_rank_bytes: Memory in use on the GPU of each rank before the trial; None
            if it is unknown.
        clean: True to leave nothing in the allocators, workspaces of cuBLAS included.
    """
    used_before_bytes = None
    if used_by_rank_bytes is not None:
        used_before_bytes = used_by_rank_bytes[group.rank]
    return enforce(
        request.memory_budget_bytes,
        group.device,
        used_before_bytes,
        clean=clean,
        large_block_bytes=_LARGE_BLOCK_BYTES,
    )


def figures_of(
    request: StepRequest,
    build: Callable[..., Any],
    arguments: dict[str, Any],
    budget: Budget,
    group: RankGroup,
) -> dict[str, Any]:
    """Take the steps of a trial.

    Returns:
        The fields of ``StepFigures``.

    Raises:
        OutOfMemoryError: If the steps exceed the memory budget.
        BadConfig: If the function builds no step.
    """
    modules_before = set(sys.modules)
    recorder = StepRecorder(group.device) if request.attribute else None
    meter = StepMeter(
        budget,
        group.device,
        warmup_steps=request.warmup_steps,
        timed_steps=request.timed_steps,
        recorder=recorder,
    )
    try:
        take_steps(meter, build, arguments, request)
        loss = None if meter.facts.loss is None else meter.facts.loss()
    except (Exception, SystemExit) as error:
        explained = _explained(error, request.function)
        # Other ranks may wait for this one, which ends them all.
        if recorder is None or group.world_size > 1 or out_of_memory(explained) is None:
            raise explained from error
        return _figures_out_of_memory(meter, budget, recorder, explained)
    contents = None
    if recorder is None:
        budget.check()
    else:
        contents = _read_contents(recorder)
    figures = _gathered(request, meter, budget, group, loss)
    if meter.facts.end is not None:
        meter.facts.end()
    group.leave()
    return figures | {
        "contents": contents,
        "settings": dict(meter.facts.settings or {}),
        "imported": [name for name in sys.modules if name not in modules_before],
    }


def _read_contents(
    recorder: StepRecorder, error: BaseException | None = None
) -> dict[str, Any]:
    """Return the recorded contents of memory, as JSON.

    Args:
        recorder: Recorder of the steps.
        error: Error of the step that ran out of memory, if one did.
    """
    # Reading what was recorded needs memory, too.
    lift_memory_limit()
    return recorder.contents(error).model_dump(mode="json")


def _figures_out_of_memory(
    meter: StepMeter, budget: Budget, recorder: StepRecorder, error: BaseException
) -> dict[str, Any]:
    """Return the figures of a trial that recorded how it ran out of memory."""
    contents = _read_contents(recorder, error)
    return {
        "steps": meter.steps,
        "optimizer_steps": meter.optimizer_steps,
        "step_s": [],
        "units_per_step": 0.0,
        "peak_bytes": budget.peak_bytes(),
        "non_pytorch_bytes": budget.non_pytorch_bytes,
        "contents": contents,
    }


def take_steps(
    meter: StepMeter,
    build: Callable[..., Any],
    arguments: dict[str, Any],
    request: StepRequest,
) -> None:
    """Build the step, and take the steps of a trial.

    Raises:
        BadConfig: If the function neither returns a step nor trains for as many steps.
    """
    end_watch = meter.watch()
    try:
        with contextlib.suppress(EnoughSteps):
            meter.restart(request.steps)
            step = build(**load.accepted(build, arguments))
            if callable(step):
                _require_no_argument(step, request.function)
                is_loop = hasattr(step, LOOP)
                meter.facts = getattr(step, "autotune_facts", StepFacts())
                meter.restart(
                    request.steps if is_loop else max(request.steps, LOOP_STEPS)
                )
                meter.take(step)
            elif meter.steps < FEWEST_STEPS:
                raise BadConfig(
                    f"{request.function} returned {type(step).__name__} after"
                    f" {meter.steps} optimizer steps",
                    next_step=(
                        "Return a function that takes one optimizer step, or train for"
                        f" {FEWEST_STEPS} steps."
                    ),
                )
            else:
                meter.trains = True
    finally:
        end_watch()


def _require_no_argument(step: Callable[..., object], function: str) -> None:
    """Raise ``BadConfig`` if a step cannot be called without a batch."""
    if any((load.parameters_of(step) or {}).values()):
        raise BadConfig(
            f"the step of {function} requires an argument, which a probe does not have",
            next_step="Give it a default: the largest batch that can occur.",
        )


def _gathered(
    request: StepRequest,
    meter: StepMeter,
    budget: Budget,
    group: RankGroup,
    loss: float | None,
) -> dict[str, Any]:
    """Return the figures of all ranks; every rank must call this.

    A step takes as long as its slowest rank, and fits if it fits on the fullest one.

    Raises:
        ValueError: If ranks took different numbers of steps, or the loss is not finite.
    """
    step_s = meter.step_s()
    step_counts = {round(count) for count in group.all_gather_float(len(step_s))}
    if len(step_counts) > 1:
        raise ValueError(
            f"ranks took different numbers of steps: {sorted(step_counts)}"
        )
    if loss is not None and not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    slowest_s = group.all_reduce_max(*step_s)
    peak_bytes_by_rank = [
        round(peak_bytes) for peak_bytes in group.all_gather_float(budget.peak_bytes())
    ]
    non_pytorch_bytes = budget.non_pytorch_bytes
    if non_pytorch_bytes is not None:
        non_pytorch_bytes = round(group.all_reduce_max(non_pytorch_bytes)[0])
    model_flops = meter.facts.model_flops
    if model_flops is not None:
        (model_flops,) = group.all_reduce_sum(model_flops)
    host_peak_bytes = max(status_bytes("VmHWM"), budget.host_peak_bytes)
    return {
        "steps": len(step_s),
        "optimizer_steps": meter.optimizer_steps,
        "step_s": slowest_s[request.warmup_steps :],
        "units_per_step": _units_per_step(request, meter) * group.world_size,
        "peak_bytes": max(peak_bytes_by_rank),
        "peak_bytes_by_rank": peak_bytes_by_rank,
        "non_pytorch_bytes": non_pytorch_bytes,
        "step_peak_bytes": _maxima(group, meter.peak_bytes),
        "kept_bytes": _maxima(group, meter.kept_bytes),
        "gradient_bytes": meter.gradient_bytes,
        "host_peak_bytes": round(group.all_reduce_max(host_peak_bytes)[0]),
        "trains": meter.trains,
        "local_ranks": group.world_size,
        "loss": loss,
        "model_flops_per_step": model_flops,
    }


def _units_per_step(request: StepRequest, meter: StepMeter) -> float:
    """Return the units of throughput of an optimizer step on one rank."""
    micro_batches = meter.facts.micro_batches
    if micro_batches is None:
        # A loop's calls are not seen: one micro-batch is assumed.
        micro_batches = round(statistics.median(meter.calls_by_step or [1]))
    return request.size * request.units_per_size * micro_batches


def _maxima(group: RankGroup, by_step_bytes: Sequence[int]) -> list[int]:
    """Return the highest bytes of any rank, by step."""
    return [round(highest) for highest in group.all_reduce_max(*by_step_bytes)]


def _explained(error: BaseException, name: str) -> BaseException:
    """Return an error of your code as the trial reports it.

    It is out of memory if that was its cause.
    """
    cause: BaseException | None = error
    while cause is not None:
        if out_of_memory(cause) is not None:
            return cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, SystemExit):
        return BadConfig(
            f"{name} ended its process: sys.exit({error.code!r})",
            next_step="Let it return, or raise an error that says what is wrong.",
        )
    return error
