"""The ``step`` job: real optimizer steps of the trainer under a memory budget.

Sequences are random and full.
"""

import contextlib
import math
from typing import Any

import torch

from autotune.memory.jobs.worst_case import fullest_batch
from autotune.memory.values import StepRequest
from autotune.trials.jobs.budget import Budget, enforce, keep_one_arena
from trainer.build import Training, build_training
from trainer.checkpoint.tensors import make_optimizer_state
from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.device_events import DeviceEvent, mark
from trainer.distributed.optimizer import learning_rate
from trainer.distributed.parallel import reshard_weights
from trainer.distributed.ranks import Ranks, join_ranks, leave_ranks

PREPARED = 4
"""Steps whose micro-batches are made in advance and reused in rotation: a GPU must not
wait for them."""
IN_FLIGHT = 2
"""Steps queued on a GPU, so that launching one overlaps computing the other."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Build the model and take optimizer steps, together with the other ranks.

    Args:
        measured: A ``StepRequest``.
        local: ``device_used_before_bytes``: NVML's figure from before the trial, a list
            of them by local rank, or None. For several ranks without torchrun also
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
    used: int | list[int] | None = local.get("device_used_before_bytes")
    before_bytes = used[ranks.local_rank] if isinstance(used, list) else used
    # On a GPU, the workspaces that are there by now stay, as in training.
    budget = enforce(
        request.memory_budget_bytes, ranks, before_bytes, clean=config.device == "cpu"
    )
    step_s, loss, flops = _take_steps(request, ranks)
    budget.check()
    figures = _gather_figures(ranks, budget, step_s, loss)
    figures["model_flops_per_step"] = ranks.all_reduce_sum(flops)[0]
    leave_ranks(together=True)
    sequences_per_step = (
        ranks.world_size
        * gradient_accumulation_steps(config, ranks.world_size)
        * config.micro_batch_size
    )
    figures["step_s"] = figures["step_s"][request.warmup_steps :]
    figures["padded_tokens_per_step"] = sequences_per_step * config.seq_length_tokens
    return figures


def _take_steps(request: StepRequest, ranks: Ranks) -> tuple[list[float], float, float]:
    """Return the seconds of each step, the last loss, and this rank's FLOPs a step."""
    config = request.config
    training = build_training(config, request.vocab_size, request.special_ids, ranks)
    steps = request.warmup_steps + request.timed_steps
    pinned = config.device == "cuda" and config.data.pin_memory
    prepared = [
        _batches(request, ranks, pinned=pinned) for _ in range(min(steps, PREPARED))
    ]
    # As a training begins.
    make_optimizer_state(training)
    training.step.rehearse(prepared[0][0])
    began: list[DeviceEvent] = []
    ended: list[DeviceEvent] = []
    for number in range(steps):
        batches = prepared[number % PREPARED]
        if len(ended) >= IN_FLIGHT:
            # No further ahead of the device than the trainer.
            ended[-IN_FLIGHT].wait()
        ranks.all_reduce_sum(0.0)  # ranks begin together
        began.append(mark(ranks.device))
        result = training.step.run(batches, learning_rate(config, number))
        ended.append(mark(ranks.device))
        # The last step starts after an evaluation, those before after steps.
        if number in (request.warmup_steps - 1, steps - 1):
            _evaluate(training, batches[0], config, ranks.device)
    loss = float(result.loss)  # waits for the device
    flops = sum(
        training.work.step_flops(batch.tokens_N.numpy(), batch.predicted_tokens)
        for batch in prepared[0]
    )
    step_s = [end.seconds_since(begin) for begin, end in zip(began, ended, strict=True)]
    return step_s, loss, flops


def _batches(request: StepRequest, ranks: Ranks, *, pinned: bool) -> list[MicroBatch]:
    """Return the micro-batches of a step."""
    batches = []
    for _ in range(gradient_accumulation_steps(request.config, ranks.world_size)):
        batch = fullest_batch(
            request.config,
            request.vocab_size,
            request.special_ids,
            documents_per_sequence=request.documents_per_sequence,
        )
        batches.append(batch.pin_memory() if pinned else batch)
    return batches


def _evaluate(
    training: Training, batch: MicroBatch, config: TrainConfig, device: torch.device
) -> None:
    """Evaluate as the trainer does: a size that fits also holds such a batch."""
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


def _gather_figures(
    ranks: Ranks, budget: Budget, step_s: list[float], loss: float
) -> dict[str, Any]:
    """Return the job's figures.

    A step takes as long as its slowest rank, and fits if it fits on the fullest one.

    Raises:
        ValueError: If ranks took different numbers of steps, or the loss is not finite.
    """
    peaks = [round(peak) for peak in ranks.all_gather_float(budget.peak_bytes())]
    step_counts = {round(steps) for steps in ranks.all_gather_float(len(step_s))}
    if len(step_counts) > 1:
        raise ValueError(
            f"ranks took different numbers of steps: {sorted(step_counts)}"
        )
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    slowest_s = ranks.all_reduce_max(*step_s)
    non_pytorch_bytes = budget.non_pytorch_bytes
    if non_pytorch_bytes is not None:
        non_pytorch_bytes = round(ranks.all_reduce_max(non_pytorch_bytes)[0])
    return {
        "optimizer_steps": len(step_s),
        "step_s": slowest_s,
        "peak_bytes": max(peaks),
        "peak_bytes_by_rank": peaks,
        "non_pytorch_bytes": non_pytorch_bytes,
        "local_ranks": ranks.local_world_size,
        "loss": loss,
    }
