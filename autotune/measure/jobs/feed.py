"""The ``feed`` job: a window of training on the dataset with so many loader workers, or on batches from memory."""

import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autotune.measure.jobs import footprint
from autotune.measure.jobs.consumers import Consumer, ReplayedStep, TrainingStep
from trainer.batch import make_plan
from trainer.build import build_training
from trainer.config import TrainConfig
from trainer.dataset import TokenDataset
from trainer.feed import MicroBatch, MicroBatchSource, make_loader, micro_batch_plans
from trainer.parallel import Ranks, join_ranks, leave_ranks
from trainer.schema import parse_table
from trainer.stream import MicroBatchPlan

CACHED_BATCHES = 32
"""Enough of them that they cost what rows cost in the mean, few enough that they cost no memory."""
WARM_UP_STEPS = 2
NOT_READY_S = 0.005
"""A batch that lies in a queue is there in less."""


def run(measured: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Train for a window of time and count, together with the other ranks.

    Args:
        measured: ``config`` (a trainer configuration, with the loader settings to try), ``cached`` (batches from
            memory: the ceiling), ``round`` (windows of one round see the same rows), ``window_s``, ``min_steps``,
            ``local_ranks``, ``replayed_step_s`` (or None: the
            trainer's own step), ``sample_delay_s`` (added to the reading of each sample), ``page_cache`` (``warm``,
            ``cold`` or ``as_is``).
        place: ``data_dir``, the dataset's directory; with several ranks ``environment`` and ``rendezvous``.

    Returns:
        The fields of ``FeedFigures``, the same from every rank.
    """
    config = parse_table(TrainConfig, measured["config"], where="trial")
    rendezvous = Path(place["rendezvous"]) if "rendezvous" in place else None
    ranks = join_ranks(config, environment=place.get("environment", {}), rendezvous=rendezvous)
    if ranks.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun has it, so that ranks do not compete for the same cores
    # One micro-batch a step: accumulation repeats what is measured here. And no end: the window decides.
    rows = config.micro_batch_rows * ranks.world_size
    no_others = {"global_batch_tokens": None, "global_batch_samples": None, "max_epochs": None}
    # Other rows in every round, so that what some rows cost is noise between rounds and no bias in all of them.
    seed = config.seed + measured["round"]
    config = config.model_copy(update={"global_batch_rows": rows, "seed": seed} | no_others)
    dataset = TokenDataset.open(Path(place["data_dir"]))
    consumer: Consumer
    if measured["replayed_step_s"] is None:
        manifest = dataset.manifest
        training = build_training(config, manifest.vocab_size, manifest.special_ids, ranks)
        consumer = TrainingStep(training.step, config, ranks.device)
    else:
        consumer = ReplayedStep(measured["replayed_step_s"])
    _settle_page_cache(dataset, measured["page_cache"], ranks)
    cached_share = dataset.cached_share()
    loader = _batches(dataset, config, ranks, measured)
    ready = 0 if measured["cached"] else config.data.loader_workers * config.data.prefetch_batches
    drained = _drain(loader, ready)
    step_s = _warm_up(loader, consumer)
    figures = _measure(loader, consumer, config, ranks, _steps(step_s, config, ranks, measured))
    leave_ranks(together=True)
    return figures | {
        "optimizer_steps": WARM_UP_STEPS + figures["steps"],
        "discarded_batches": drained + WARM_UP_STEPS,
        "page_cache_share": cached_share,
        "local_ranks": ranks.local_world_size,
    }


def _settle_page_cache(dataset: TokenDataset, wanted: str, ranks: Ranks) -> None:
    """Have the dataset's files in memory, or not; one rank of the host does it for all."""
    if ranks.local_rank == 0 and wanted == "cold":
        dataset.forget()
    if ranks.local_rank == 0 and wanted == "warm":
        dataset.fetch()
    ranks.sum(0.0)


def _batches(
    dataset: TokenDataset, config: TrainConfig, ranks: Ranks, measured: dict[str, Any]
) -> Iterator[MicroBatch]:
    plan = make_plan(config, len(dataset), world_size=ranks.world_size)
    source = MicroBatchSource(dataset, config, plan)
    # Endless: the loader draws from it lazily.
    plans = micro_batch_plans(dataset, config, plan, rank=ranks.rank)
    if measured["cached"]:
        made = [source.__getitems__(next(plans)) for _ in range(CACHED_BATCHES)]
        pinned = config.data.pin_memory and config.device == "cuda"
        return itertools.cycle([batch.pin_memory() for batch in made] if pinned else made)
    return make_loader(_Delayed(source, measured["sample_delay_s"]), config, plans)


class _Delayed:
    """A source on storage that takes longer for every sample."""

    def __init__(self, source: MicroBatchSource, sample_delay_s: float) -> None:
        self._source, self._sample_delay_s = source, sample_delay_s

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        if self._sample_delay_s:
            time.sleep(self._sample_delay_s * len(plan.segments))
        return self._source.__getitems__(plan)


def _drain(loader: Iterator[MicroBatch], ready: int) -> int:
    """Take what the queues hold ready, without a step, so that a slow loader has no head start left.

    Args:
        loader: Just begun.
        ready: How many batches its queues hold at most.

    Returns:
        How many were taken: twice as many, or fewer where a batch that was not ready shows that the queues are empty.
    """
    for number in range(2 * ready):
        asked_s = time.perf_counter()
        next(loader)
        if number >= ready and time.perf_counter() - asked_s > NOT_READY_S:
            return number + 1
    return 2 * ready


def _warm_up(loader: Iterator[MicroBatch], consumer: Consumer) -> float:
    """Take the first steps; gives the seconds of the last one."""
    for _ in range(WARM_UP_STEPS):
        started_s = time.perf_counter()
        consumer.step(loader)
        consumer.finish()
    return time.perf_counter() - started_s


def _steps(step_s: float, config: TrainConfig, ranks: Ranks, measured: dict[str, Any]) -> int:
    """How many steps fill the window, on all ranks the same."""
    steps = max(measured["min_steps"], math.ceil(measured["window_s"] / max(step_s, 1e-6)))
    # Workers that began together give batches in volleys; a window that cuts one in two would miscount.
    volley = max(1, config.data.loader_workers)
    return round(ranks.max(math.ceil(steps / volley) * volley)[0])


def _measure(
    loader: Iterator[MicroBatch], consumer: Consumer, config: TrainConfig, ranks: Ranks, steps: int
) -> dict[str, Any]:
    read_before = footprint.storage_read_bytes()
    consumer.wait.read()
    real_tokens = slots = 0
    ranks.sum(0.0)
    start_s = time.monotonic()
    for _ in range(steps):
        batch = consumer.step(loader)
        real_tokens += batch.real_tokens
        slots += batch.ids_BS.numel()
    consumer.finish()
    end_s = time.monotonic()
    read_after = footprint.storage_read_bytes()
    slowest_s, wait_share = ranks.max(end_s - start_s, consumer.wait.read() / (end_s - start_s))
    memory, workers = footprint.memory_bytes(), footprint.private_bytes_of_children()
    read = None if read_before is None or read_after is None else read_after - read_before
    return {
        "steps": steps,
        "real_tokens_per_s": ranks.sum(real_tokens)[0] / slowest_s,
        "slot_tokens_per_s": ranks.sum(slots)[0] / slowest_s,
        "data_wait_share": min(1.0, wait_share),
        "window_start_s": -ranks.max(-start_s)[0],
        "window_end_s": ranks.max(end_s)[0],
        "memory_bytes": _sum(ranks, memory),
        "worker_bytes": round(ranks.max(max(workers, default=0))[0]) or None,
        "storage_bytes_per_s": None if (total := _sum(ranks, read)) is None else total / slowest_s,
    }


def _sum(ranks: Ranks, value: float | None) -> int | None:
    """Over all ranks; None where one does not know."""
    total = ranks.sum(math.nan if value is None else float(value))[0]
    return None if math.isnan(total) else round(total)
