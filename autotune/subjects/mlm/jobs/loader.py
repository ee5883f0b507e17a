"""The trainer's loader of its dataset, for windows of training."""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.subjects.mlm.jobs.window_settings import window_settings
from autotune.subjects.subject import LoaderFacts
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.data.sampler import MicroBatchPlan
from trainer.formats.train_config import TrainConfig


def build_loader(
    config: Mapping[str, Any],
    data_dir: str,
    *,
    num_workers: int,
    prefetch_factor: int,
    pin_memory: bool,
    most_micro_batches: int,
    round_number: int = 0,
    sample_delay_s: float = 0.0,
) -> "TrainerLoader":
    """Return an endless loader of this rank's micro-batches.

    Args:
        config: Settings of the training, as JSON.
        data_dir: Directory of the dataset.
        num_workers: DataLoader workers of the rank.
        prefetch_factor: Micro-batches that each of them loads ahead.
        pin_memory: True to pin memory for copies to the GPU.
        most_micro_batches: Limit of micro-batches in a step of each rank.
        round_number: Number of the window's round, from 0.
        sample_delay_s: Delay added to the reading of each sample, which simulates a
            slower storage.
    """
    dataset = TokenDataset.open(Path(data_dir))
    settings, micro_batches = window_settings(
        config, dataset, most_micro_batches, round_number
    )
    data = settings.data.model_copy(
        update={
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
        }
    )
    settings = settings.model_copy(update={"data": data})
    batches = rank_batches(
        dataset,
        settings,
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        sample_delay_s=sample_delay_s,
    )
    return TrainerLoader(batches, settings, micro_batches)


def rank_batches(
    dataset: TokenDataset,
    config: TrainConfig,
    *,
    rank: int,
    world_size: int,
    sample_delay_s: float = 0.0,
) -> Iterator[MicroBatch]:
    """Return an endless iterator over a rank's micro-batches, and start its workers."""
    plan = make_plan(config, len(dataset), world_size=world_size)
    source = MicroBatchSource(dataset, config, plan)
    plans = micro_batch_plans(dataset, config, plan, rank=rank)
    return make_loader(_Delayed(source, sample_delay_s), config, plans)


class TrainerLoader:
    """Micro-batches of a rank, without end."""

    def __init__(
        self, batches: Iterator[MicroBatch], config: TrainConfig, micro_batches: int
    ) -> None:
        self._batches = batches
        self._seq_length_tokens = config.seq_length_tokens
        self.autotune_facts = LoaderFacts(
            micro_batches=micro_batches, work=self._work, host_runs_ahead=True
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._batches

    def _work(self, batch: MicroBatch) -> dict[str, float]:
        """Return the tokens of a micro-batch, and its share of a replayed step.

        That of a full micro-batch, whose sequences are not trimmed, is 1.
        """
        return {
            "units": batch.non_padding_tokens,
            "padded_units": batch.ids_BS.numel(),
            "samples": len(batch.tokens_N),
            "share": batch.ids_BS.shape[1] / self._seq_length_tokens,
        }


class _Delayed:
    """Source of micro-batches with a delay for every sample: a slower storage."""

    def __init__(self, source: MicroBatchSource, sample_delay_s: float) -> None:
        self._source = source
        self._sample_delay_s = sample_delay_s

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        if self._sample_delay_s:
            time.sleep(self._sample_delay_s * len(plan.segments))
        return self._source.__getitems__(plan)
