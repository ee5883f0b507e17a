"""The ``step`` job: real optimizer steps of the trainer's own step, on random full rows, under a memory budget.

Shapes: B rows of a micro-batch, S tokens of a row.
"""

import math
import time
from typing import Any

import torch

from autotune.measure.jobs.budget import enforce
from trainer.build import build_training
from trainer.config import TrainConfig
from trainer.dataset import SpecialIds
from trainer.feed import MicroBatch
from trainer.masking import head_slots
from trainer.parallel import join_ranks
from trainer.schedule import learning_rate
from trainer.schema import parse_table


def run(measured: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Build the model and take steps.

    Args:
        measured: ``config`` (a trainer configuration), ``vocab_size``, ``special_ids``, ``memory_budget_bytes`` (or
            None), ``warmup_steps`` and ``timed_steps``.
        place: ``device_used_before_bytes``, NVML's figure from before the trial, or None.

    Returns:
        The fields of ``StepFigures``.
    """
    config = parse_table(TrainConfig, measured["config"], where="trial")
    special_ids = parse_table(SpecialIds, measured["special_ids"], where="trial")
    ranks = join_ranks(config, environment={})
    device = ranks.device
    budget = enforce(measured["memory_budget_bytes"], device, place.get("device_used_before_bytes"))

    step = build_training(config, measured["vocab_size"], special_ids, ranks).step
    # As the feed delivers them.
    stored = torch.uint16 if measured["vocab_size"] <= 2**16 else torch.uint32
    step_s: list[float] = []
    steps = measured["warmup_steps"] + measured["timed_steps"]
    for number in range(steps):
        # Every row full: the worst case that training can meet.
        batch = _random_batch(config, measured["vocab_size"], special_ids, stored)
        started_s = time.perf_counter()
        result = step.run([batch], learning_rate(config, number))
        loss = float(result.loss_share)  # waits for the device
        step_s.append(time.perf_counter() - started_s)
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    if device.type == "cuda" and torch.cuda.memory_stats(device).get("num_alloc_retries", 0):
        # It went through only because the allocator gave cached blocks back and tried again; a long run would not.
        raise torch.OutOfMemoryError("the allocator had to retry")
    return {
        "optimizer_steps": steps,
        "step_s": step_s[measured["warmup_steps"] :],
        "slot_tokens_per_step": config.micro_batch_rows * config.seq_length_tokens,
        "peak_bytes": budget.peak_bytes(),
        "outside_allocator_bytes": budget.outside_allocator_bytes,
        "loss": loss,
    }


def _random_batch(config: TrainConfig, vocab_size: int, special_ids: SpecialIds, dtype: torch.dtype) -> MicroBatch:
    rows, width = config.micro_batch_rows, config.seq_length_tokens
    ordinary = torch.tensor(sorted(set(range(vocab_size)) - set(special_ids.all())))
    ids = ordinary[torch.randint(len(ordinary), (rows * width,))]
    # As many to predict as a micro-batch has room for.
    drawn = torch.randperm(rows * width)[: head_slots(rows * width, config.masking_probability)]
    predicted = drawn.sort().values
    targets = ids[predicted]
    ids[predicted] = special_ids.mask
    # One place is padding, because a batch without any takes a shorter way through attention, without a mask in memory.
    tokens_N = torch.full((rows,), width, dtype=torch.int32)
    tokens_N[-1] -= 1
    return MicroBatch(
        ids_BS=ids.to(dtype).reshape(rows, width),
        starts_N=torch.arange(0, rows * width, width, dtype=torch.int32),
        tokens_N=tokens_N,
        predicted_P=predicted.to(torch.int32),
        targets_P=targets.to(dtype),
        real_tokens=int(tokens_N.sum()),
        predicted_tokens=len(predicted),
        most_predicted_in_row=int(torch.bincount(predicted // width).max()),
    )
