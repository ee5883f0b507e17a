"""The ``step`` job: real optimizer steps of the trainer, on random full sequences, under a memory budget."""

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
from trainer.data.loader import MicroBatch
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

    Return the fields of ``StepFigures``.

    ``measured`` is a ``StepRequest``. ``local`` has ``device_used_before_bytes``:
    NVML's figure from before the trial, a list of them by local rank, or None; for
    several ranks without torchrun also ``environment``, as torchrun would set it, and
    ``rendezvous``, a file. Every rank returns the same.
    """
    asked = StepRequest.of(measured)
    config = asked.config
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
        asked.memory_budget_bytes, ranks, before_bytes, clean=config.device == "cpu"
    )
    step_s, loss, flops = _take_steps(asked, ranks)
    budget.check()
    figures = _of_all(ranks, budget, step_s, loss) | {
        "model_flops_per_step": ranks.all_reduce_sum(flops)[0]
    }
    leave_ranks(together=True)
    rows = (
        ranks.world_size
        * gradient_accumulation_steps(config, ranks.world_size)
        * config.micro_batch_size
    )
    timed_s = figures["step_s"][asked.warmup_steps :]
    return figures | {
        "step_s": timed_s,
        "padded_tokens_per_step": rows * config.seq_length_tokens,
    }


def _take_steps(asked: StepRequest, ranks: Ranks) -> tuple[list[float], float, float]:
    """Return the seconds of each step, the last step's loss, and this rank's FLOPs per step."""
    config = asked.config
    training = build_training(config, asked.vocab_size, asked.special_ids, ranks)
    steps = asked.warmup_steps + asked.timed_steps
    pinned = config.device == "cuda" and config.data.pin_memory
    ready = [_batches(asked, ranks, pinned=pinned) for _ in range(min(steps, PREPARED))]
    # As a training begins.
    make_optimizer_state(training)
    training.step.rehearse(ready[0][0])
    spans: list[tuple[DeviceEvent, DeviceEvent]] = []
    for number in range(steps):
        batches = ready[number % PREPARED]
        if len(spans) >= IN_FLIGHT:
            # No further ahead of the device than the trainer.
            spans[-IN_FLIGHT][1].wait()
        ranks.all_reduce_sum(0.0)  # they begin together
        began = mark(ranks.device)
        result = training.step.run(batches, learning_rate(config, number))
        spans.append((began, mark(ranks.device)))
        # The last step starts after an evaluation, those before after steps.
        if number in (asked.warmup_steps - 1, steps - 1):
            _evaluate(training, batches[0], config, ranks.device)
    loss = float(result.loss)  # waits for the device
    flops = sum(
        training.work.step_flops(one.tokens_N.numpy(), one.predicted_tokens)
        for one in ready[0]
    )
    return [ended.seconds_since(began) for began, ended in spans], loss, flops


def _batches(asked: StepRequest, ranks: Ranks, *, pinned: bool) -> list[MicroBatch]:
    """Return the micro-batches of a step."""
    model, documents = (
        (asked.config, asked.vocab_size, asked.special_ids),
        asked.documents_per_sequence,
    )
    count = gradient_accumulation_steps(asked.config, ranks.world_size)
    made = [
        fullest_batch(*model, documents_per_sequence=documents) for _ in range(count)
    ]
    return [batch.pin_memory() for batch in made] if pinned else made


def _evaluate(
    training: Training, batch: MicroBatch, config: TrainConfig, device: torch.device
) -> None:
    """Evaluate as the trainer does, so that a size that fits also holds a batch of evaluation."""
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


def _of_all(
    ranks: Ranks, budget: Budget, step_s: list[float], loss: float
) -> dict[str, Any]:
    """Return the job's figures: a step takes as long as its slowest rank, and fits if it fits on the fullest one."""
    peaks = [round(peak) for peak in ranks.all_gather_float(budget.peak_bytes())]
    taken = {round(steps) for steps in ranks.all_gather_float(len(step_s))}
    non_pytorch_bytes = budget.non_pytorch_bytes
    if len(taken) > 1:
        raise ValueError(f"ranks took different numbers of steps: {sorted(taken)}")
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    return {
        "optimizer_steps": len(step_s),
        "step_s": ranks.all_reduce_max(*step_s),
        "peak_bytes": max(peaks),
        "peak_bytes_by_rank": peaks,
        "non_pytorch_bytes": (
            None
            if non_pytorch_bytes is None
            else round(ranks.all_reduce_max(non_pytorch_bytes)[0])
        ),
        "local_ranks": ranks.local_world_size,
        "loss": loss,
    }
