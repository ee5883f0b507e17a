"""The ``step`` job: real optimizer steps of the trainer under a memory budget.

Sequences are random and full.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autotune.memory.jobs.worst_case import fullest_batch
from autotune.memory.values import StepRequest
from autotune.trials.jobs.budget import Budget, enforce
from autotune.trials.jobs.cpu_allocators import keep_one_arena
from trainer.build import Training, build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.device_events import DeviceEvent, mark
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.parallel import reshard_weights
from trainer.distributed.ranks import Ranks, join_ranks, leave_ranks

PREPARED_STEPS = 4
"""Steps whose micro-batches are made in advance and reused in rotation: a GPU
must not wait for them."""
QUEUED_STEPS = 2
"""Steps queued on a GPU, so that launching one overlaps computing the other."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Build the model and take optimizer steps, together with the other ranks.

    Args:
        measured: A ``StepRequest``.
        local: ``device_used_before_bytes``: NVML's figures from before the trial, by
            local rank, or None. For several ranks without torchrun also
            ``environment``, as torchrun would set it, and ``rendezvous``, a file.

    Returns:
        The fields of ``StepFigures``, the same on every rank.
    """
    request = StepRequest.of(measured)
    config = request.config
    if config.device == "cpu":
        keep_one_arena()
    ranks = join_ranks(
        config,
        environment=local.get("environment", {}),
        rendezvous=local.get("rendezvous"),
    )
    # Joining has allocated its memory by now, the model has not.
    budget = _enforce_budget(request, ranks, local.get("device_used_before_bytes"))
    steps = take_steps(request, ranks)
    budget.check()
    figures = gather_figures(ranks, budget, steps, warmup_steps=request.warmup_steps)
    leave_ranks(together=True)
    return figures | {"padded_tokens_per_step": _padded_tokens_per_step(config, ranks)}


def _enforce_budget(
    request: StepRequest, ranks: Ranks, used_by_rank_bytes: Sequence[int] | None
) -> Budget:
    """Limit the memory of this rank, and measure it from here on.

    Args:
        request: Request with the memory budget.
        ranks: Ranks, of which this process is one.
        used_by_rank_bytes: Memory in use on the GPU of each local rank before the
            trial; None if it is unknown.
    """
    used_before_bytes = None
    if used_by_rank_bytes is not None:
        used_before_bytes = used_by_rank_bytes[ranks.local_rank]
    return enforce(
        request.memory_budget_bytes,
        ranks,
        used_before_bytes,
        # On a GPU, the workspaces that exist by now stay, as in training.
        clean=request.config.device == "cpu",
    )


def _padded_tokens_per_step(config: TrainConfig, ranks: Ranks) -> int:
    """Return the tokens of a step on all ranks."""
    micro_batches = ranks.world_size * gradient_accumulation_steps(
        config, ranks.world_size
    )
    return micro_batches * config.micro_batch_size * config.seq_length_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsTaken:
    """Measurements of one rank's optimizer steps."""

    step_s: list[float]
    """Duration of each step in seconds, warm-up included."""
    loss: float
    """Loss of the last step."""
    model_flops_per_step: float
    """Model FLOPs of this rank in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedStep:
    """Events between which the device took a step."""

    began: DeviceEvent
    ended: DeviceEvent


def take_steps(request: StepRequest, ranks: Ranks) -> StepsTaken:
    """Build the model, and take and time the requested steps on this rank."""
    config = request.config
    training = build_training(config, request.vocab_size, request.special_ids, ranks)
    step_count = request.warmup_steps + request.timed_steps
    prepared = [
        batches_of_step(request, ranks) for _ in range(min(step_count, PREPARED_STEPS))
    ]
    # The trainer also allocates the optimizer's state and rehearses a step beforehand.
    make_optimizer_state(training)
    training.step.rehearse(prepared[0][0])
    timed: list[_TimedStep] = []
    for number in range(step_count):
        batches = prepared[number % PREPARED_STEPS]
        if len(timed) >= QUEUED_STEPS:
            # As in the trainer, the host runs this far ahead of the device at most.
            timed[-QUEUED_STEPS].ended.wait()
        # An all-reduce makes the ranks begin together.
        ranks.all_reduce_sum(0.0)
        began = mark(ranks.device)
        result = training.step.run(batches, learning_rate(config, number))
        timed.append(_TimedStep(began=began, ended=mark(ranks.device)))
        # A step after an evaluation may need other blocks of memory. An evaluation
        # follows warm-up, so that every trial has such a step, and the last step.
        is_warmed_up = number == request.warmup_steps - 1
        is_last = number == step_count - 1
        if is_warmed_up or is_last:
            evaluate_once(training, batches[0], config, ranks.device)
    # Reading the loss waits for the device; only then do all events have a time.
    loss = float(result.loss)
    return StepsTaken(
        step_s=[step.ended.seconds_since(step.began) for step in timed],
        loss=loss,
        model_flops_per_step=sum(
            training.work.step_flops(batch.tokens_N.numpy(), batch.predicted_tokens)
            for batch in prepared[0]
        ),
    )


def batches_of_step(request: StepRequest, ranks: Ranks) -> list[MicroBatch]:
    """Return the micro-batches of a step, pinned if the trainer pins them."""
    config = request.config
    is_pinned = config.device == "cuda" and config.data.pin_memory
    batches = []
    for _ in range(gradient_accumulation_steps(config, ranks.world_size)):
        batch = fullest_batch(
            config,
            request.vocab_size,
            request.special_ids,
            documents_per_sequence=request.documents_per_sequence,
        )
        batches.append(batch.pin_memory() if is_pinned else batch)
    return batches


def evaluate_once(
    training: Training, batch: MicroBatch, config: TrainConfig, device: torch.device
) -> None:
    """Evaluate a micro-batch as the trainer does: a size fits only if this fits, too.

    The trainer runs compiled layers eagerly in an evaluation, and so does this.
    """
    training.module.eval()
    eager = (
        torch.compiler.set_stance("force_eager")
        if config.compiled
        else contextlib.nullcontext()
    )
    with torch.no_grad(), eager:
        float(training.module.evaluate(batch.to(device))[0])
    reshard_weights(training.module)
    training.module.train()


def gather_figures(
    ranks: Ranks, budget: Budget, steps: StepsTaken, *, warmup_steps: int
) -> dict[str, Any]:
    """Return the figures of all ranks; every rank must call this.

    A step takes as long as its slowest rank, and fits if it fits on the fullest one.

    Args:
        ranks: Ranks, of which this process is one.
        budget: Memory budget of this rank.
        steps: Steps of this rank.
        warmup_steps: Number of steps to leave out of ``step_s``.

    Raises:
        ValueError: If ranks took different numbers of steps, or the loss is not finite.
    """
    peak_bytes_by_rank = [
        round(peak_bytes) for peak_bytes in ranks.all_gather_float(budget.peak_bytes())
    ]
    step_count = len(steps.step_s)
    step_counts = {round(count) for count in ranks.all_gather_float(step_count)}
    if len(step_counts) > 1:
        raise ValueError(
            f"ranks took different numbers of steps: {sorted(step_counts)}"
        )
    if not math.isfinite(steps.loss):
        raise ValueError(f"the loss is {steps.loss}")
    slowest_s = ranks.all_reduce_max(*steps.step_s)
    non_pytorch_bytes = budget.non_pytorch_bytes
    if non_pytorch_bytes is not None:
        non_pytorch_bytes = round(ranks.all_reduce_max(non_pytorch_bytes)[0])
    (model_flops_per_step,) = ranks.all_reduce_sum(steps.model_flops_per_step)
    return {
        "optimizer_steps": step_count,
        "step_s": slowest_s[warmup_steps:],
        "peak_bytes": max(peak_bytes_by_rank),
        "peak_bytes_by_rank": peak_bytes_by_rank,
        "non_pytorch_bytes": non_pytorch_bytes,
        "local_ranks": ranks.local_world_size,
        "loss": steps.loss,
        "model_flops_per_step": model_flops_per_step,
    }
