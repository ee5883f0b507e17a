"""Train on a dataset that is slower or lies in memory.

``python -m testbed.simulators.limited_run LIMIT … ARGUMENTS``: ``delay=0.002`` adds
this many seconds to the reading of each sample; ``cached=32`` makes this many
micro-batches once and takes them again and again. ``delay=0.002@1`` slows down rank 1
alone. Everything else is the trainer, record and all.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import trainer.data.loader
from trainer.__main__ import main as train
from trainer.data.loader import Source, make_loader
from trainer.data.micro_batch import MicroBatch
from trainer.data.sampler import MicroBatchPlan
from trainer.formats.train_config import TrainConfig


class Delayed:
    """A source on storage that takes longer for every sample."""

    def __init__(self, source: Source, sample_delay_s: float) -> None:
        self._source, self._sample_delay_s = source, sample_delay_s

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        time.sleep(self._sample_delay_s * len(plan.segments))
        return self._source.__getitems__(plan)


def limited_loader(kind: str, amount: float) -> object:
    """Return a loader like the trainer's own, under a limit."""

    def loader(
        source: Source, config: TrainConfig, plans: Iterable[MicroBatchPlan]
    ) -> Iterator[MicroBatch]:
        if kind == "delay":
            return make_loader(Delayed(source, amount), config, plans)
        return _again(source, iter(plans), round(amount))

    return loader


def _again(
    source: Source, plans: Iterator[MicroBatchPlan], count: int
) -> Iterator[MicroBatch]:
    made = [source.__getitems__(plan) for plan in itertools.islice(plans, count)]
    yield from made
    # Drawn all the same: the record tells how far it is by them.
    for number, _ in enumerate(plans):
        yield made[number % count]


def main() -> int:
    """Train under a limit; the exit code is the trainer's."""
    limit, _, rank = sys.argv[1].partition("@")
    kind, _, amount = limit.partition("=")
    if kind not in ("delay", "cached"):
        sys.stderr.write(
            f"error: {sys.argv[1]}: neither delay=SECONDS[@RANK] nor"
            " cached=BATCHES[@RANK]\n"
        )
        return 2
    if rank in ("", os.environ.get("RANK", "0")):
        loader: Any = trainer.data.loader
        loader.make_loader = limited_loader(kind, float(amount))
    del sys.argv[1]
    return train()


if __name__ == "__main__":
    sys.exit(main())
