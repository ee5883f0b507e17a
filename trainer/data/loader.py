"""Micro-batches of one rank, made in this process or in DataLoader workers.

The training process makes plans a little ahead of their use; workers read and mask the
planned samples.
"""

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from trainer.data.batch_plan import BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.data.position import Position, join_positions
from trainer.data.sampler import MicroBatchPlan, SequenceSampler
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import TrainConfig
from trainer.health.signals import ignore_signals
from trainer.runtime.ranks import Ranks


class Source(Protocol):
    """Source of micro-batches, made from their plans."""

    # torch's DataLoader calls a method of this name once for a whole batch.
    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        """Return the micro-batch of a plan.

        Raises:
            BadConfig: If the dataset is corrupt.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerError:
    """Error that a DataLoader worker returns in place of a micro-batch."""

    message: str
    next_step: str


class _SourceInWorker(Dataset[MicroBatch | _WorkerError]):
    """Source for DataLoader workers that returns errors as values.

    torch's DataLoader would raise another exception than the worker did.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch | _WorkerError:
        """Return the micro-batch of a plan, or the error in its place."""
        try:
            return self._source.__getitems__(plan)
        except BadConfig as error:
            return _WorkerError(message=error.message, next_step=error.next_step)


def _micro_batches_of(
    results: Iterator[MicroBatch | _WorkerError],
) -> Iterator[MicroBatch]:
    """Yield the micro-batches that workers return, up to an error.

    Raises:
        BadConfig: If a worker returned an error.
    """
    for result in results:
        if isinstance(result, _WorkerError):
            # This lets the workers exit. The error's traceback would keep the iterator
            # for Python's collector of cycles, which closes its queues before torch can
            # tell the workers to exit.
            del results
            raise BadConfig(result.message, next_step=result.next_step)
        yield result


def make_loader(
    source: Source, config: TrainConfig, plans: Iterable[MicroBatchPlan]
) -> Iterator[MicroBatch]:
    """Return an iterator over micro-batches, in the order of their plans.

    Micro-batches are made in as many DataLoader workers as configured, or in this
    process if there are none.

    Raises:
        BadConfig: While iterating, if the dataset is corrupt.
    """
    must_pin = config.data.pin_memory and config.device == "cuda"
    workers = config.data.num_workers
    if not workers:
        # torch's DataLoader would only add a sixth to the time.
        batches = map(source.__getitems__, plans)
        if not must_pin:
            return batches
        return (batch.pin_memory() for batch in batches)
    loader = DataLoader(
        _SourceInWorker(source),
        num_workers=workers,
        prefetch_factor=config.data.prefetch_factor,
        pin_memory=must_pin,
        batch_sampler=plans,  # type: ignore[arg-type]  # one plan holds all samples of a batch
        # The source already returns a whole micro-batch.
        collate_fn=lambda batch: batch,
        worker_init_fn=lambda _: ignore_signals(),
        # Python's default since 3.14 would pickle the dataset.
        multiprocessing_context="fork",
    )
    # This starts the workers now.
    results = iter(loader)
    return _micro_batches_of(results)


def micro_batch_plans(
    dataset: TokenDataset,
    config: TrainConfig,
    plan: BatchPlan,
    rank: int,
    *,
    steps: int | None = None,
    position: Position | None = None,
) -> Iterator[MicroBatchPlan]:
    """Return an iterator over the micro-batch plans of a rank.

    Args:
        dataset: Dataset that is planned for.
        config: Configuration of the run.
        plan: Plan of the whole job.
        rank: Rank whose micro-batches are planned.
        steps: Number of optimizer steps to plan; None for no end.
        position: Position of the first step; None for the start of the data.
    """
    plans = iter(
        SequenceSampler(
            plan, dataset, rank, position, packs_ahead=config.data.num_workers > 0
        )
    )
    if steps is None:
        return plans
    return islice(plans, steps * plan.gradient_accumulation_steps)


class MicroBatchLoader:
    """Micro-batches of a run, one optimizer step at a time.

    Every rank calls it at the same steps.
    """

    def __init__(
        self, dataset: TokenDataset, config: TrainConfig, plan: BatchPlan, ranks: Ranks
    ) -> None:
        self._dataset = dataset
        self._config = config
        self._plan = plan
        self._ranks = ranks
        self._source = MicroBatchSource(dataset, config, plan)
        self._micro_batches: Iterator[MicroBatch] = iter(())
        # Plans of the micro-batches that are not taken yet, to know their samples.
        self._upcoming_plans: Iterator[MicroBatchPlan] = iter(())
        self._workers: list[BaseProcess] = []
        self.position = Position.start(plan)
        """Position after the last step taken. Lanes that only other ranks follow are
        ``UNKNOWN`` in it, but not in ``job_position``."""
        self.samples: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Dataset indices of the samples in this rank's part of the last step taken."""

    def start_at(self, position: Position) -> None:
        """Start loading, or restart it, at a position."""
        self.close()
        self.position = position
        plans = micro_batch_plans(
            self._dataset, self._config, self._plan, self._ranks.rank, position=position
        )
        plans, self._upcoming_plans = itertools.tee(plans)
        # torch does not say which processes it starts: they are those that are new.
        other_processes = set(multiprocessing.active_children())
        self._micro_batches = make_loader(self._source, self._config, plans)
        self._workers = [
            process
            for process in multiprocessing.active_children()
            if process not in other_processes
        ]

    def wait_for_first(self) -> list[MicroBatch]:
        """Wait for this rank's micro-batches of the next step, and return them.

        They are not taken: ``next_step`` returns them again.
        """
        batches = list(
            islice(self._micro_batches, self._plan.gradient_accumulation_steps)
        )
        self._micro_batches = itertools.chain(batches, self._micro_batches)
        return batches

    def check_first_step(self) -> None:
        """Check that no sample is computed twice in the next step.

        All ranks call it after ``wait_for_first``, which makes the plans of the step.

        Raises:
            BadConfig: If two ranks, or one rank twice, compute the same sample.
        """
        self._upcoming_plans, plans = itertools.tee(self._upcoming_plans)
        sample_numbers = []
        for plan in islice(plans, self._plan.gradient_accumulation_steps):
            segments = plan.segments
            # A sample may come again in the next epoch, so that is part of its number.
            sample_numbers.append(
                segments.epochs * len(self._dataset) + segments.samples
            )
        check_no_shared_samples(
            self._ranks.all_gather_object(np.concatenate(sample_numbers))
        )

    def next_step(
        self, take: Callable[[Iterator[MicroBatch], int], list[MicroBatch]]
    ) -> list[MicroBatch]:
        """Take the micro-batches of the next step; none after the last epoch.

        Steps that are empty on all ranks are skipped.

        Args:
            take: Function that takes a number of micro-batches from an iterator, such
                as ``DataWait.take``.

        Raises:
            BadConfig: If the dataset is corrupt.
        """
        empty_sequences = 0
        while True:
            batches = self._take_step(take)
            if self._config.max_epochs is None:
                return batches
            tokens = sum(batch.non_padding_tokens for batch in batches)
            (tokens_of_all_ranks,) = self._ranks.all_reduce_sum(tokens)
            if tokens_of_all_ranks:
                return batches
            # Sequences come from the lanes in turn, and a lane that has ended gives
            # empty ones. After as many empty sequences in a row as there are lanes,
            # every lane has ended.
            empty_sequences += self._config.global_batch_size
            if empty_sequences >= self._plan.lanes:
                return []

    def _take_step(
        self, take: Callable[[Iterator[MicroBatch], int], list[MicroBatch]]
    ) -> list[MicroBatch]:
        """Take the micro-batches of a step, and note its samples and its position."""
        batches = take(self._micro_batches, self._plan.gradient_accumulation_steps)
        plans = list(islice(self._upcoming_plans, len(batches)))
        self.samples = np.concatenate([plan.segments.samples for plan in plans])
        position = plans[-1].after
        assert position is not None
        self.position = position
        return batches

    def job_position(self) -> Position:
        """Return the position of the whole job, joined from those of all ranks.

        All ranks call it after the same step.
        """
        return join_positions(self._ranks.all_gather_object(self.position))

    def close(self) -> None:
        """Stop the DataLoader workers."""
        # This ends the DataLoader, which lets its workers exit and waits for them.
        self._micro_batches = iter(())
        for worker in self._workers:
            worker.kill()  # it may hang in a file system that does not respond
        self._workers = []


def check_no_shared_samples(samples_by_rank: Sequence[npt.NDArray[np.int64]]) -> None:
    """Check that no sample is computed twice in a step.

    Args:
        samples_by_rank: Numbers that identify sample and epoch, for every rank.

    Raises:
        BadConfig: If two ranks, or one rank twice, compute the same sample.
    """
    all_samples = np.concatenate([np.zeros(0, dtype=np.int64), *samples_by_rank])
    if len(np.unique(all_samples)) == len(all_samples):
        return
    for rank, other_rank in itertools.combinations(range(len(samples_by_rank)), 2):
        common = np.intersect1d(samples_by_rank[rank], samples_by_rank[other_rank])
        if len(common):
            raise BadConfig(
                f"ranks {rank} and {other_rank} received {len(common)} samples in"
                " common in their first step",
                next_step=(
                    "This is a bug of the trainer, or ranks were started with the same"
                    " RANK: check those."
                ),
            )
    raise BadConfig(
        "a rank received a sample twice in its first step",
        next_step="This is a bug of the trainer.",
    )
