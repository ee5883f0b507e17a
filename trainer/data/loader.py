"""Micro-batches of one rank, made in this process or in DataLoader workers.

The training process makes plans a little ahead of their use; workers read and mask the
planned samples. Ids and positions are copied in their small stored types, and widened
on the device.

Shapes: B sequences of a micro-batch, S positions of a sequence, N samples in the
micro-batch, P tokens to predict.
"""

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.config.train_config import TRIMMED_LAYOUTS, TrainConfig
from trainer.data.batch_plan import (
    SPECIAL_TOKENS_PER_SAMPLE,
    BatchPlan,
    Int64,
    Segments,
)
from trainer.data.dataset import TokenDataset
from trainer.data.masking import IGNORED_LABEL, Ids, Masker
from trainer.data.sampler import (
    MicroBatchPlan,
    Position,
    SequenceSampler,
    join_positions,
)
from trainer.distributed.device_events import DeviceEvent
from trainer.distributed.ranks import Ranks
from trainer.errors import BadConfig
from trainer.health.watchdog import ignore_signals

WIDTH_STEP_TOKENS = 64
"""Multiple to which the width of ``bucketed`` micro-batches is rounded up: few shapes,
in tiles of Tensor Cores. ``dynamic`` ones are not rounded, as in transformers'
collator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, or, after ``to``, on a device."""

    ids_BS: torch.Tensor
    """Ids, uint16 or uint32 as stored, with special tokens, masks and padding."""
    starts_N: torch.Tensor
    """Start of each sample in the flattened sequences, int32, ascending."""
    tokens_N: torch.Tensor
    """Tokens of each sample, int32, special tokens included."""
    predicted_P: torch.Tensor
    """Positions of the tokens to predict in the flattened sequences, int32."""
    targets_P: torch.Tensor
    """Original ids of the tokens to predict, in the type of ``ids_BS``."""
    non_padding_tokens: int
    predicted_tokens: int
    most_predicted_in_sequence: int
    padded_sequences: int
    """Sequences that end in padding; empty ones are padding only."""
    after: Position | None = None
    """Position of the job after this optimizer step; only with the last micro-batch of
    a step."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device, asynchronously if the memory is pinned."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Copy to page-locked memory; called by the DataLoader."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        names = ("ids_BS", "starts_N", "tokens_N", "predicted_P", "targets_P")
        moved: dict[str, Any] = {name: move(getattr(self, name)) for name in names}
        return replace(self, **moved)

    def wide_ids_BS(self) -> torch.Tensor:
        """Return the ids as int64, which embeddings require."""
        return self.ids_BS.to(torch.int64)

    def attention_BS(self) -> torch.Tensor:
        """Return the padding mask, int64, 1 for non-padding tokens.

        For sequences of one sample each.
        """
        sequences, width = self.ids_BS.shape
        device = self.ids_BS.device
        # In an empty sequence the first pad token counts, as a softmax over nothing
        # would be NaN; it adds no loss.
        lengths_B = torch.ones(sequences, dtype=torch.int32, device=device)
        lengths_B[self.starts_N.to(torch.int64) // width] = self.tokens_N
        positions_S = torch.arange(width, device=device)
        return (positions_S[None, :] < lengths_B[:, None]).to(torch.int64)

    def labels_BS(self) -> torch.Tensor:
        """Return the labels, int64.

        They are ``IGNORED_LABEL`` at positions that are not predicted.
        """
        labels_BS = torch.full(
            self.ids_BS.shape,
            IGNORED_LABEL,
            dtype=torch.int64,
            device=self.ids_BS.device,
        )
        predicted_P = self.predicted_P.to(torch.int64)
        labels_BS.view(-1)[predicted_P] = self.targets_P.to(torch.int64)
        return labels_BS


class MicroBatchSource(Dataset[MicroBatch]):
    """Micro-batches of one rank, made from their plans.

    They are the same in any process, in any order.
    """

    def __init__(
        self, dataset: TokenDataset, config: TrainConfig, plan: BatchPlan
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._special_ids = dataset.manifest.special_ids
        self._masker = Masker(
            vocab_size=dataset.manifest.used_vocab_size,
            mask_id=self._special_ids.mask,
            special_ids=self._special_ids.all(),
            probability=config.masking_probability,
            seed=config.seed,
        )

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        """Read a whole micro-batch, add special tokens and mask it.

        Raises:
            BadConfig: If the dataset is corrupt.
        """
        segments = plan.segments
        tokens = segments.tokens
        width = self._width_tokens(tokens)
        ids = np.full(
            self._plan.sequences_per_micro_batch * width,
            self._special_ids.pad,
            dtype=self._dataset.dtype,
        )
        starts = segments.sequences * width + segments.positions
        ids[starts] = self._special_ids.cls
        ids[starts + tokens + 1] = self._special_ids.sep
        self._dataset.read_into(
            ids, starts + 1, segments.shards, segments.begins, tokens
        )
        predicted, targets = self._mask(ids, starts + 1, segments)
        framed_tokens = tokens + SPECIAL_TOKENS_PER_SAMPLE
        sequence_edges = np.arange(0, len(ids) + 1, width)
        is_full = np.isin(sequence_edges[1:], starts + framed_tokens)
        predicted_per_sequence = np.diff(np.searchsorted(predicted, sequence_edges))
        return MicroBatch(
            ids_BS=torch.from_numpy(ids.reshape(-1, width)),
            starts_N=torch.from_numpy(starts.astype(np.int32)),
            tokens_N=torch.from_numpy(framed_tokens.astype(np.int32)),
            predicted_P=torch.from_numpy(predicted.astype(np.int32)),
            targets_P=torch.from_numpy(targets),
            non_padding_tokens=int(framed_tokens.sum()),
            predicted_tokens=len(predicted),
            padded_sequences=len(is_full) - int(is_full.sum()),
            after=plan.after,
            most_predicted_in_sequence=int(predicted_per_sequence.max()),
        )

    def _width_tokens(self, tokens: Int64) -> int:
        """Return the number of positions of each sequence of a micro-batch."""
        width = self._plan.seq_length_tokens
        if self._plan.layout not in TRIMMED_LAYOUTS:
            return width
        longest = int(tokens.max(initial=0)) + SPECIAL_TOKENS_PER_SAMPLE
        multiple = WIDTH_STEP_TOKENS if self._plan.layout == "bucketed" else 1
        return min(width, -(-longest // multiple) * multiple)

    def _mask(
        self, ids: Ids, begins: Int64, segments: Segments
    ) -> tuple[Int64, npt.NDArray[np.integer[Any]]]:
        # Checked here, as a GPU would read past the end of the embedding table.
        if int(ids.max(initial=0)) < self._dataset.manifest.vocab_size:
            with contextlib.suppress(IndexError):
                return self._masker.corrupt(
                    ids,
                    begins,
                    segments.tokens,
                    epochs=segments.epochs,
                    samples=segments.samples,
                )
        directory = self._dataset.directory
        raise BadConfig(
            f"dataset {directory} contains ids that exceed its vocabulary",
            next_step=(
                "The dataset is corrupt. Find all faults: autotune data verify"
                f" {directory}"
            ),
        )


class Source(Protocol):
    """Source of micro-batches, made from their plans."""

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        """Return the micro-batch of a plan."""


class _SourceInWorker(Dataset[MicroBatch | dict[str, str]]):
    """Source for DataLoader workers.

    It returns errors as values, as torch's DataLoader alters exceptions.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch | dict[str, str]:
        try:
            return self._source.__getitems__(plan)
        except BadConfig as error:
            return {"message": error.message, "next_step": error.next_step}


def _raise_error(result: MicroBatch | dict[str, str]) -> MicroBatch:
    """Return the micro-batch of a worker, or raise the error that it returned."""
    if isinstance(result, dict):
        raise BadConfig(**result)
    return result


def make_loader(
    source: Source, config: TrainConfig, plans: Iterable[MicroBatchPlan]
) -> Iterator[MicroBatch]:
    """Return micro-batches in the order of their plans.

    Workers and prefetching are as configured.
    """
    pinned = config.data.pin_memory and config.device == "cuda"
    workers = config.data.num_workers
    if not workers:
        # torch's loader would add nothing but a sixth of the time.
        batches = map(source.__getitems__, plans)
        return (batch.pin_memory() for batch in batches) if pinned else batches
    loader = DataLoader(
        _SourceInWorker(source),
        num_workers=workers,
        prefetch_factor=config.data.prefetch_factor,
        pin_memory=pinned,
        batch_sampler=plans,  # type: ignore[arg-type]  # one plan holds all samples of a batch
        # The source already returns a whole micro-batch.
        collate_fn=lambda batch: batch,
        worker_init_fn=lambda _: ignore_signals(),
        # Python's default since 3.14 would pickle the dataset.
        multiprocessing_context="fork",
    )
    return map(_raise_error, loader)


def micro_batch_plans(
    dataset: TokenDataset,
    config: TrainConfig,
    plan: BatchPlan,
    rank: int,
    *,
    steps: int | None = None,
    position: Position | None = None,
) -> Iterator[MicroBatchPlan]:
    """Return the plans of a rank from a position on.

    They are for ``steps`` optimizer steps, or endless if it is None.
    """
    plans = iter(
        SequenceSampler(
            plan, dataset, rank, position, ahead=config.data.num_workers > 0
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
        self._loader: Iterator[MicroBatch] = iter(())
        self._workers: list[BaseProcess] = []
        self.position = Position.start(plan)
        """Position after the last step taken; lanes of other ranks are out of date, see
        ``job_position``."""
        self.samples: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Numbers of the samples in this rank's part of the last step taken."""

    def start_at(self, position: Position) -> None:
        """Start loading, or restart it, at a position."""
        self.close()
        self.position = position
        plans = micro_batch_plans(
            self._dataset, self._config, self._plan, self._ranks.rank, position=position
        )
        # Plans sent to the loader are kept until their micro-batches are used, to know
        # the samples of a step.
        plans, self._upcoming_plans = itertools.tee(plans)
        other_processes = set(multiprocessing.active_children())
        self._loader = make_loader(self._source, self._config, plans)
        self._workers = [
            process
            for process in multiprocessing.active_children()
            if process not in other_processes
        ]

    def wait_for_first(self) -> list[MicroBatch]:
        """Return this rank's part of the next step without taking it.

        Empty at the end of the data.
        """
        batches = list(islice(self._loader, self._plan.gradient_accumulation_steps))
        self._loader = itertools.chain(batches, self._loader)
        return batches

    def check_first_step(self) -> None:
        """Check that ranks share no samples in the next step.

        Call ``wait_for_first`` before. All ranks call it.

        Raises:
            BadConfig: If two ranks share samples.
        """
        self._upcoming_plans, plans = itertools.tee(self._upcoming_plans)
        numbers = []
        for plan in islice(plans, self._plan.gradient_accumulation_steps):
            segments = plan.segments
            numbers.append(segments.epochs * len(self._dataset) + segments.samples)
        check_no_shared_samples(self._ranks.all_gather_object(np.concatenate(numbers)))

    def next_step(
        self, take: Callable[[Iterator[MicroBatch], int], list[MicroBatch]]
    ) -> list[MicroBatch]:
        """Return the micro-batches of the next step; none after the last epoch.

        ``take`` gets a number of them from the loader.
        """
        empty_sequences = 0
        while True:
            batches = take(self._loader, self._plan.gradient_accumulation_steps)
            plans = list(islice(self._upcoming_plans, len(batches)))
            self.samples = np.concatenate([plan.segments.samples for plan in plans])
            position = plans[-1].after
            assert position is not None
            self.position = position
            if self._config.max_epochs is None:
                return batches
            tokens = sum(batch.non_padding_tokens for batch in batches)
            if any(self._ranks.all_reduce_sum(tokens)):
                return batches
            # Lanes alternate and end one by one: all have ended after as many empty
            # sequences as there are lanes.
            empty_sequences += self._config.global_batch_size
            if empty_sequences >= self._plan.lanes:
                return []

    def job_position(self) -> Position:
        """Return the position of the whole job, joined from those of all ranks."""
        return join_positions(self._ranks.all_gather_object(self.position))

    def close(self) -> None:
        """Stop the DataLoader workers."""
        self._loader = iter(())
        for worker in self._workers:
            worker.kill()  # it may hang in a file system that does not respond
        self._workers = []


class DataWait:
    """Timer of data loading.

    It takes micro-batches from a loader and adds up the time for which the device had
    to wait for them.
    """

    def __init__(self, mark_now: Callable[[], DeviceEvent]) -> None:
        self._mark_now = mark_now
        self._end_of_work: DeviceEvent | None = None
        self._waited_s = 0.0
        self._gaps: list[_Gap] = []

    def take(self, loader: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """Return the micro-batches of one optimizer step."""
        batches = []
        for _ in range(count):
            end_of_work = self._end_of_work
            was_idle = end_of_work is None or end_of_work.reached()
            began_s = time.perf_counter()
            batches.append(next(loader))
            if was_idle or end_of_work is None:
                self._waited_s += time.perf_counter() - began_s
            elif end_of_work.reached():
                # The device ran out of work in between, and waited from then until a
                # mark that it reaches at once.
                self._gaps.append(_Gap(began=end_of_work, ended=self._mark_now()))
                self._end_of_work = None
        return batches

    def device_busy_until(self, end_of_work: DeviceEvent) -> None:
        """Note the event at which the device's work so far ends."""
        self._end_of_work = end_of_work

    def take_waited_s(self) -> float:
        """Return the seconds waited since the last call.

        If a GPU ran out of work, wait until it passed that point.
        """
        for gap in self._gaps:
            gap.ended.wait()
        waited_s = self._waited_s + sum(
            max(0.0, gap.ended.seconds_since(gap.began)) for gap in self._gaps
        )
        self._waited_s = 0.0
        self._gaps = []
        return waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Time in which a device had no work."""

    began: DeviceEvent
    ended: DeviceEvent


def check_no_shared_samples(samples_by_rank: Sequence[npt.NDArray[np.int64]]) -> None:
    """Check that no sample is computed twice.

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
