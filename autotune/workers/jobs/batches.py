"""Batches for a window: loaded from the dataset, or cached."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from trainer.config.train_config import TrainConfig
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import make_loader, micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.data.sampler import MicroBatchPlan
from trainer.distributed.ranks import Ranks

CACHED_BATCHES = 32
"""Number of cached batches: enough for average sequences, few enough for memory."""
NOT_READY_S = 0.005
"""Shortest wait for a batch that shows that no queue held it ready."""


def batches_of(
    dataset: TokenDataset,
    config: TrainConfig,
    ranks: Ranks,
    *,
    cached: bool = True,
    sample_delay_s: float = 0.0,
) -> Iterator[MicroBatch]:
    """Return an endless iterator over a rank's micro-batches.

    Args:
        dataset: Dataset to read.
        config: Trainer settings.
        ranks: Ranks, of which this process is one.
        cached: True to load ``CACHED_BATCHES`` micro-batches in this process and repeat
            them; False to load every one, with the DataLoader workers of ``config``.
        sample_delay_s: Delay added to the reading of each sample, unless cached.
    """
    plan = make_plan(config, len(dataset), world_size=ranks.world_size)
    source = MicroBatchSource(dataset, config, plan)
    plans = micro_batch_plans(dataset, config, plan, rank=ranks.rank)
    if not cached:
        return make_loader(_Delayed(source, sample_delay_s), config, plans)
    without_workers = config.model_copy(
        update={"data": config.data.model_copy(update={"num_workers": 0})}
    )
    loader = make_loader(source, without_workers, plans)
    return itertools.cycle(list(itertools.islice(loader, CACHED_BATCHES)))


class _Delayed:
    """Source of micro-batches with a delay for every sample: a slower storage."""

    def __init__(self, source: MicroBatchSource, sample_delay_s: float) -> None:
        self._source = source
        self._sample_delay_s = sample_delay_s

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        if self._sample_delay_s:
            time.sleep(self._sample_delay_s * len(plan.segments))
        return self._source.__getitems__(plan)


def drain(loader: Iterator[Any], ready: int) -> int:
    """Take the batches that are ready in queues, so that a window has no head start.

    A slow loader would deliver them faster than it can sustain.

    Args:
        loader: Loader to drain.
        ready: Number of batches that the queues hold if they are full.

    Returns:
        Number of batches taken: more than ``ready`` and at most twice as many, as
        workers refill the queues meanwhile. The last one was not ready, unless they
        keep up to the end. 0 if ``ready`` is 0.
    """
    for number in range(2 * ready):
        started_s = time.perf_counter()
        next(loader)
        wait_s = time.perf_counter() - started_s
        if number >= ready and wait_s > NOT_READY_S:
            return number + 1
    return 2 * ready
