"""The ``feed`` job: real training steps on the dataset, with so many loader processes or on cached batches."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.batch import make_plan
from trainer.build import build_training
from trainer.config import TrainConfig
from trainer.dataset import TokenDataset
from trainer.feed import MicroBatch, MicroBatchSource, make_loader, micro_batch_plans
from trainer.parallel import join_ranks
from trainer.schedule import learning_rate
from trainer.schema import parse_table
from trainer.step import TrainStep

CACHED_BATCHES = 4
"""Enough of them that lengths vary, few enough that they cost no memory."""


def run(measured: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Train for a window of time and count.

    Args:
        measured: ``config`` (a trainer configuration, with the loader settings to try), ``cached`` (batches from
            memory: the ceiling), ``window_s``, ``min_steps``.
        place: ``data_dir``, the dataset's directory.

    Returns:
        The fields of ``FeedFigures``.
    """
    config = parse_table(TrainConfig, measured["config"], where="trial")
    # One micro-batch a step: accumulation repeats what is measured here. And no end: the window decides.
    config = config.model_copy(
        update={
            "global_batch_rows": config.micro_batch_rows,
            "global_batch_tokens": None,
            "global_batch_samples": None,
            "max_epochs": None,
        }
    )
    ranks = join_ranks(config, environment={})
    dataset = TokenDataset.open(Path(place["data_dir"]))
    step = build_training(config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks).step
    batches = _batches(dataset, config, cached=measured["cached"])
    discard = 2 + 2 * config.data.loader_workers * config.data.prefetch_batches
    for number in range(discard):
        float(step.run([next(batches)], learning_rate(config, number)).loss)
    figures = _measure(step, batches, config, measured["window_s"], measured["min_steps"])
    return figures | {"optimizer_steps": discard + len(figures["step_s"]), "discarded_steps": discard}


def _batches(dataset: TokenDataset, config: TrainConfig, *, cached: bool) -> Iterator[MicroBatch]:
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    # Endless: the loader draws from it lazily.
    plans = micro_batch_plans(dataset, config, plan, rank=0)
    if cached:
        return itertools.cycle([source.__getitems__(next(plans)) for _ in range(CACHED_BATCHES)])
    return make_loader(source, config, plans)


def _measure(
    step: TrainStep, batches: Iterator[MicroBatch], config: TrainConfig, window_s: float, min_steps: int
) -> dict[str, Any]:
    """Take steps until both the time and the number of steps are reached."""
    step_s: list[float] = []
    wait_s = 0.0
    real_tokens = 0
    start_s = time.monotonic()
    while len(step_s) < min_steps or time.monotonic() - start_s < window_s:
        asked_s = time.perf_counter()
        batch = next(batches)
        wait_s += time.perf_counter() - asked_s
        result = step.run([batch], learning_rate(config, len(step_s)))
        float(result.loss)  # waits for the device
        step_s.append(time.perf_counter() - asked_s)
        real_tokens += batch.real_tokens
    end_s = time.monotonic()
    slots = config.micro_batch_rows * config.seq_length_tokens * len(step_s)
    return {
        "real_tokens_per_s": real_tokens / (end_s - start_s),
        "slot_tokens_per_s": slots / (end_s - start_s),
        "data_wait_share": wait_s / sum(step_s),
        "step_s": step_s,
        "window_start_s": start_s,
        "window_end_s": end_s,
    }
