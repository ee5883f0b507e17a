"""Micro-batches for one rank: plan + dataset + masking, in this process or in loader processes.

The plan is made in the training process, a little ahead of its use; loader processes get the places of samples, read
and mask them. Ids and positions travel as small as they are stored, and become what a model takes on the device.

Shapes: B rows of a micro-batch, S places of a row, N samples in it, P tokens to predict.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.config import TrainConfig
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.masking import IGNORED_LABEL, Masker, MaskingRule
from trainer.plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan, Int64
from trainer.stream import MicroBatchPlan, Position, RowStream
from trainer.watch import ignore_signals

WIDTH_STEP_TOKENS = 64
"""Bucketed rows are as wide as their longest sample, rounded up to this: few shapes, and matrix units like them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, or, after ``to``, on a device."""

    ids_BS: torch.Tensor
    """uint16 or uint32 as stored, with special tokens, corrupted, padded with the pad id."""
    starts_N: torch.Tensor
    """int32, where each sample begins in the flattened rows; ascending."""
    tokens_N: torch.Tensor
    """int32, tokens of each sample, special tokens included."""
    predicted_P: torch.Tensor
    """int32, places in the flattened rows of the tokens to predict."""
    targets_P: torch.Tensor
    """As ``ids_BS``: what stood there."""
    real_tokens: int
    predicted_tokens: int
    most_predicted_in_row: int
    after: Position | None = None
    """Where the job is behind this micro-batch's optimizer step; only with the last micro-batch of a step."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device, without waiting where the memory is pinned."""
        return self._moved(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """What the loader calls to page-lock a batch."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        return replace(
            self,
            ids_BS=move(self.ids_BS),
            starts_N=move(self.starts_N),
            tokens_N=move(self.tokens_N),
            predicted_P=move(self.predicted_P),
            targets_P=move(self.targets_P),
        )

    def wide_ids_BS(self) -> torch.Tensor:
        """int64, as embeddings take them."""
        return self.ids_BS.to(torch.int64)

    def attention_BS(self) -> torch.Tensor:
        """int64, 1 where a token is real; for rows of one sample each.

        An empty row attends to its first pad token, as a softmax over nothing would be NaN; it weighs nothing.
        """
        rows, width = self.ids_BS.shape
        lengths_B = torch.ones(rows, dtype=torch.int32, device=self.ids_BS.device)
        lengths_B[self.starts_N.to(torch.int64) // width] = self.tokens_N
        return (torch.arange(width, device=lengths_B.device)[None, :] < lengths_B[:, None]).to(torch.int64)

    def labels_BS(self) -> torch.Tensor:
        """int64, ``IGNORED_LABEL`` where nothing is predicted."""
        labels = torch.full(self.ids_BS.shape, IGNORED_LABEL, dtype=torch.int64, device=self.ids_BS.device)
        labels.view(-1)[self.predicted_P.to(torch.int64)] = self.targets_P.to(torch.int64)
        return labels


class MicroBatchSource(Dataset[MicroBatch]):
    """Makes micro-batches of one rank from their plans; the same from any process, in any order."""

    def __init__(self, dataset: TokenDataset, config: TrainConfig, plan: BatchPlan) -> None:
        manifest = dataset.manifest
        self._dataset = dataset
        self._plan = plan
        self._special = manifest.special_ids
        self._vocab_size = manifest.vocab_size
        self._bucketed = plan.layout == "bucketed"
        rule = MaskingRule(
            vocab_size=manifest.used_vocab_size,
            mask_id=self._special.mask,
            special_ids=self._special.all(),
            probability=config.masking_probability,
        )
        self._masker = Masker(rule, config.seed)

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        """Read, frame, corrupt and lay out a whole micro-batch at once: what the loader calls for a batch of rows.

        Raises:
            BadConfig: If the dataset is damaged.
        """
        segments = plan.segments
        tokens = segments.tokens
        width = self._width(tokens)
        ids = np.full(self._plan.rows_per_microbatch_per_rank * width, self._special.pad, dtype=self._dataset.dtype)
        starts = segments.rows * width + segments.columns
        ids[starts] = self._special.cls
        ids[starts + tokens + 1] = self._special.sep
        self._dataset.read_into(ids, starts + 1, segments.shards, segments.begins, tokens)
        predicted, targets = self._corrupt(ids, starts + 1, plan)
        return MicroBatch(
            ids_BS=torch.from_numpy(ids.reshape(-1, width)),
            starts_N=torch.from_numpy(starts.astype(np.int32)),
            tokens_N=torch.from_numpy((tokens + SPECIAL_TOKENS_PER_SAMPLE).astype(np.int32)),
            predicted_P=torch.from_numpy(predicted.astype(np.int32)),
            targets_P=torch.from_numpy(targets),
            real_tokens=int(tokens.sum()) + SPECIAL_TOKENS_PER_SAMPLE * len(tokens),
            predicted_tokens=len(predicted),
            most_predicted_in_row=int(np.bincount(predicted // width, minlength=1).max()),
            after=plan.after,
        )

    def _width(self, tokens: np.ndarray) -> int:
        if not self._bucketed:
            return self._plan.row_tokens
        longest = int(tokens.max(initial=0)) + SPECIAL_TOKENS_PER_SAMPLE
        return min(self._plan.row_tokens, -(-longest // WIDTH_STEP_TOKENS) * WIDTH_STEP_TOKENS)

    def _corrupt(self, ids: np.ndarray, places: np.ndarray, plan: MicroBatchPlan) -> tuple[np.ndarray, np.ndarray]:
        segments = plan.segments
        # Checked for all ids, as an embedding table would read past its end on a GPU, far from here.
        if int(ids.max(initial=0)) < self._vocab_size:
            try:
                return self._masker.corrupt(
                    ids, places, segments.tokens, epochs=segments.epochs, samples=segments.samples
                )
            except IndexError:
                pass
        raise BadConfig(
            f"{self._dataset.directory} holds ids that its tokenizer does not have",
            next_step=f"The dataset is damaged. See what is wrong: autotune data verify {self._dataset.directory}",
        )


class Source(Protocol):
    """Makes micro-batches from their plans."""

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch:
        """The micro-batch of a plan."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """What is wrong with the data, as a loader process tells it: torch's loader would make another error of it."""

    message: str
    next_step: str


class _ToldSource(Dataset[MicroBatch | _Refusal]):
    """A source for loader processes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitems__(self, plan: MicroBatchPlan) -> MicroBatch | _Refusal:
        try:
            return self._source.__getitems__(plan)
        except BadConfig as error:
            return _Refusal(message=error.message, next_step=error.next_step)


def _or_refused(made: MicroBatch | _Refusal) -> MicroBatch:
    if isinstance(made, _Refusal):
        raise BadConfig(made.message, next_step=made.next_step)
    return made


def make_loader(source: Source, config: TrainConfig, plans: Iterable[MicroBatchPlan]) -> Iterator[MicroBatch]:
    """Micro-batches in the order of their plans, with the configured processes and prefetching."""
    pinned = config.data.pin_memory and config.device == "cuda"
    workers = config.data.loader_workers
    if not workers:
        # Nothing is left for torch's loader to do, and it would take a sixth of the time.
        made = map(source.__getitems__, plans)
        return (batch.pin_memory() for batch in made) if pinned else made
    loader = DataLoader(
        _ToldSource(source),
        batch_sampler=plans,  # type: ignore[arg-type]  # one plan names all samples of a batch
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=config.data.prefetch_batches,
        pin_memory=pinned,
        worker_init_fn=_begin_loading,
        multiprocessing_context="fork",  # Python's default since 3.14 would send them everything through pipes
    )
    return map(_or_refused, loader)


def micro_batch_plans(
    dataset: TokenDataset,
    config: TrainConfig,
    plan: BatchPlan,
    rank: int,
    *,
    steps: int | None = None,
    position: Position | None = None,
) -> Iterator[MicroBatchPlan]:
    """The plans of a rank from a position on, of so many optimizer steps or for ever."""
    endless = iter(RowStream(plan, dataset, rank, position, ahead=config.data.loader_workers > 0))
    return endless if steps is None else islice(endless, steps * plan.accumulation_steps)


class Upcoming:
    """Passes plans on to the loader, and keeps each until its micro-batch is used: what a step was made of.

    Args:
        plans: Of one rank, in order.
    """

    def __init__(self, plans: Iterator[MicroBatchPlan]) -> None:
        self._plans = plans
        self._waiting: deque[MicroBatchPlan] = deque()

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return self

    def __next__(self) -> MicroBatchPlan:
        plan = next(self._plans)
        self._waiting.append(plan)
        return plan

    def used(self) -> MicroBatchPlan:
        """The plan of the next micro-batch that the loader gives."""
        return self._waiting.popleft()

    def numbers_of_samples(self, count: int, dataset_samples: int) -> Int64:
        """Numbers that tell sample and epoch, of the next so many micro-batches that the loader has been asked for."""
        segments = [plan.segments for plan in islice(self._waiting, count)]
        return np.concatenate([one.epochs * dataset_samples + one.samples for one in segments])


def _begin_loading(_: int) -> None:
    ignore_signals()


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401 - what the loader calls a list is a whole micro-batch here
    return batch
