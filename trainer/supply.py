"""What a run's steps are made of on one rank, in order, and where the whole job is in its data."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import numpy as np
import numpy.typing as npt

from trainer.config import TrainConfig
from trainer.dataset import TokenDataset
from trainer.feed import MicroBatch, MicroBatchSource, Upcoming, make_loader, micro_batch_plans
from trainer.parallel import Ranks
from trainer.plan import BatchPlan
from trainer.preflight import compare_data
from trainer.stream import Position, join_positions

TakeMicroBatches = Callable[[Iterator[MicroBatch], int], list[MicroBatch]]
"""Takes so many micro-batches from a loader."""


class Supply:
    """The micro-batches of a run, one optimizer step at a time.

    Args:
        dataset: What is trained on.
        config: With its global batch in rows.
        plan: How rows are shared out.
        ranks: All of them; each has one of these, and calls it at the same steps.
    """

    def __init__(self, dataset: TokenDataset, config: TrainConfig, plan: BatchPlan, ranks: Ranks) -> None:
        self._dataset, self._config, self._plan, self._ranks = dataset, config, plan, ranks
        self._source = MicroBatchSource(dataset, config, plan)
        self._loader: Iterator[MicroBatch] = iter(())
        self._processes: list[BaseProcess] = []
        self.position = Position.start(plan)
        """Behind the last step that was taken; lanes that other ranks pack are not up to date, see ``whole_position``.
        """
        self.samples: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Numbers of the samples in this rank's part of that step."""

    def start_at(self, position: Position) -> None:
        """Go on from a position."""
        self.close()
        self.position = position
        plans = micro_batch_plans(self._dataset, self._config, self._plan, self._ranks.rank, position=position)
        self._upcoming = Upcoming(plans)
        others = set(multiprocessing.active_children())
        self._loader = make_loader(self._source, self._config, self._upcoming)
        self._processes = [one for one in multiprocessing.active_children() if one not in others]

    def wait_for_first(self) -> list[MicroBatch]:
        """This rank's part of the next step, which is still to be taken; empty at the end of the data."""
        first = list(itertools.islice(self._loader, self._plan.accumulation_steps))
        self._loader = itertools.chain(first, self._loader)
        return first

    def compare_first(self) -> None:
        """Make sure that no two ranks have the same samples in the next step, which was waited for.

        Raises:
            BadConfig: If they do.
        """
        count = self._plan.accumulation_steps
        compare_data(self._ranks.gather(self._upcoming.numbers_of_samples(count, len(self._dataset))))

    def next_step(self, take: TakeMicroBatches) -> list[MicroBatch]:
        """Micro-batches of the next step; none when the last epoch is over."""
        empty_rows = 0
        while True:
            batches = take(self._loader, self._plan.accumulation_steps)
            plans = [self._upcoming.used() for _ in batches]
            self.samples = np.concatenate([plan.segments.samples for plan in plans])
            assert plans[-1].after is not None
            self.position = plans[-1].after
            if self._config.max_epochs is None or any(self._ranks.sum(sum(one.real_tokens for one in batches))):
                return batches
            # Lanes take turns and end one by one: only as many empty rows as there are lanes say that all have ended.
            empty_rows += self._config.global_batch_rows
            if empty_rows >= self._plan.lanes:
                return []

    def whole_position(self) -> Position:
        """Where the whole job is, from what each rank knows of it."""
        own = self.position
        lanes = self._ranks.max(*map(float, own.lanes))
        return join_positions([Position(steps=own.steps, rows=own.rows, lanes=tuple(round(lane) for lane in lanes))])

    def close(self) -> None:
        """End the loader's processes."""
        self._loader = iter(())
        for process in self._processes:
            process.kill()  # where it is still there: stuck in a file system that does not answer, say
        self._processes = []
