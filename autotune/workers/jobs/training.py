"""The ``training`` job: a timed window of training on the dataset.

Batches come from DataLoader workers, or are cached. The step is the trainer's own, or
simulated with a given duration.
"""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autotune.workers.jobs.batches import batches_of, drain
from autotune.workers.jobs.consumers import Consumer, ReplayedStep, TrainingStep
from autotune.workers.jobs.timed_window import WindowLength, timed_window
from autotune.workers.values import TrainingRequest
from trainer.build import build_training
from trainer.config.train_config import TrainConfig, gradient_accumulation_steps
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import with_batch_in_sequences
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.ranks import Ranks, join_ranks, leave_ranks, warm_up_libraries
from trainer.model.flops import ModelWork

WARM_UP_STEPS = {"cpu": 2, "cuda": 3}
"""Steps before a window, by device. The last one shows the speed of steps."""


def run(measured: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """Train all ranks for a timed window.

    Args:
        measured: A ``TrainingRequest``; its ``interleaved_with`` and ``storage`` only
            distinguish windows.
        local: ``data_dir``, the dataset's directory. With several ranks also
            ``environment``, torchrun's environment variables, and ``rendezvous``, the
            file through which the ranks connect.

    Returns:
        Fields of ``TrainingFigures``, the same from every rank.
    """
    request = TrainingRequest.of(measured)
    ranks = _join_ranks(request.config, local)
    dataset = TokenDataset.open(Path(local["data_dir"]))
    config = with_batch_in_sequences(request.config, dataset)
    micro_batches = min(
        request.most_micro_batches,
        gradient_accumulation_steps(config, ranks.world_size),
    )
    config = _window_config(config, request.round, micro_batches * ranks.world_size)
    workers = 0 if request.cached else config.data.num_workers
    consumer = _consumer(request, config, dataset, ranks, micro_batches)
    loader = batches_of(
        dataset,
        config,
        ranks,
        cached=request.cached,
        sample_delay_s=request.sample_delay_s,
    )
    drained = drain(loader, workers * config.data.prefetch_factor)
    warm_up_steps = WARM_UP_STEPS[config.device]
    step_s = _warm_up(consumer, loader, warm_up_steps)
    length = WindowLength(
        window_s=request.window_s,
        step_s=step_s,
        min_steps=request.min_steps,
        # Workers deliver in bursts of a micro-batch each. A window must have whole
        # bursts, so its steps come in groups that take as many from every worker.
        group_steps=max(1, workers // math.gcd(workers, micro_batches)),
    )
    figures = _measure_window(loader, consumer, ranks, length)
    if request.losses and isinstance(consumer, TrainingStep):
        figures["losses"] = [float(loss) for loss in consumer.losses]
    leave_ranks(together=True)
    return figures | {
        "optimizer_steps": warm_up_steps + figures["steps"],
        "discarded_batches": drained + warm_up_steps * micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "local_ranks": ranks.local_world_size,
    }


def _join_ranks(config: TrainConfig, local: dict[str, Any]) -> Ranks:
    """Join the other ranks of the window, and share the cores with them."""
    ranks = join_ranks(
        config,
        environment=local.get("environment", {}),
        rendezvous=local.get("rendezvous"),
    )
    if ranks.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # As torchrun sets it, so that ranks do not compete for cores.
        torch.set_num_threads(1)
    return ranks


def _warm_up(consumer: Consumer, loader: Iterator[MicroBatch], steps: int) -> float:
    """Take steps one by one, and return the seconds of the last one."""
    step_s = math.nan
    for _ in range(steps):
        started_s = time.perf_counter()
        consumer.step(loader)
        consumer.finish()
        step_s = time.perf_counter() - started_s
    return step_s


def _window_config(
    config: TrainConfig, round_number: int, micro_batches: int
) -> TrainConfig:
    """Return the trainer settings of a window.

    Args:
        config: Trainer settings of the training.
        round_number: Number of the window's round, from 0.
        micro_batches: Micro-batches of a step on all ranks.
    """
    return config.model_copy(
        update={
            "global_batch_size": micro_batches * config.micro_batch_size,
            # The window ends the training.
            "global_batch_tokens": None,
            "global_batch_samples": None,
            "max_epochs": None,
            # Other sequences in every round, so that their cost is noise between rounds
            # and not bias.
            "seed": config.seed + round_number,
        }
    )


def _consumer(
    request: TrainingRequest,
    config: TrainConfig,
    dataset: TokenDataset,
    ranks: Ranks,
    micro_batches: int,
) -> Consumer:
    """Return the trainer's own step, or a replayed one if the request has its time."""
    if request.replayed_step_s is not None:
        return ReplayedStep(
            request.replayed_step_s,
            lambda batch: batch.ids_BS.shape[1] / config.seq_length_tokens,
            micro_batches,
            ranks,
        )
    manifest = dataset.manifest
    warm_up_libraries(ranks)
    training = build_training(config, manifest.vocab_size, manifest.special_ids, ranks)
    return TrainingStep(training, config, micro_batches, ranks.device)


def _measure_window(
    loader: Iterator[MicroBatch], consumer: Consumer, ranks: Ranks, length: WindowLength
) -> dict[str, Any]:
    """Measure a window, and return its figures with the rates of all ranks together."""
    work = consumer.work if isinstance(consumer, TrainingStep) else None
    counter = _WorkCounter(work)
    window = timed_window(loader, consumer, ranks, counter.add_step, length)
    return window.figures | counter.rates(ranks, window.slowest_s)


class _WorkCounter:
    """Tokens and model FLOPs of one rank's steps.

    Args:
        work: Work of the model; None if the step is replayed.
    """

    def __init__(self, work: ModelWork | None) -> None:
        self._work = work
        self._tokens = 0.0
        self._padded_tokens = 0.0
        self._model_flops = 0.0

    def add_step(self, batches: list[MicroBatch]) -> None:
        """Add the work of a step."""
        self._tokens += sum(batch.non_padding_tokens for batch in batches)
        self._padded_tokens += sum(batch.ids_BS.numel() for batch in batches)
        if self._work is not None:
            self._model_flops += sum(
                self._work.step_flops(batch.tokens_N.numpy(), batch.predicted_tokens)
                for batch in batches
            )

    def rates(self, ranks: Ranks, window_s: float) -> dict[str, Any]:
        """Return the rates of all ranks together, each of which calls this."""

        def rate(total: float) -> float:
            return ranks.all_reduce_sum(total)[0] / window_s

        rates: dict[str, Any] = {
            "model_flops_per_s": None,
            "tokens_per_s": rate(self._tokens),
            "padded_tokens_per_s": rate(self._padded_tokens),
        }
        if self._work is not None:
            rates["model_flops_per_s"] = rate(self._model_flops)
        return rates
