"""Micro-batches for one rank: plan + dataset + masking, in this process or in loader processes.

Shapes: B rows of a micro-batch, S tokens of a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trainer.config import TrainConfig
from trainer.dataset import TokenDataset
from trainer.masking import IGNORED_LABEL, MaskingRule, mask_tokens
from trainer.plan import BatchPlan, RowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, or, after ``to``, on a device."""

    ids_BS: torch.Tensor
    """int64, padded with the pad id."""
    attention_BS: torch.Tensor
    """int64, 1 where a token is real."""
    labels_BS: torch.Tensor
    """int64, ``IGNORED_LABEL`` where nothing is predicted."""
    real_tokens: int
    predicted_tokens: int

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device, without waiting where the memory is pinned."""
        return MicroBatch(
            ids_BS=self.ids_BS.to(device, non_blocking=True),
            attention_BS=self.attention_BS.to(device, non_blocking=True),
            labels_BS=self.labels_BS.to(device, non_blocking=True),
            real_tokens=self.real_tokens,
            predicted_tokens=self.predicted_tokens,
        )

    def pin_memory(self) -> "MicroBatch":
        """What the loader calls to page-lock a batch."""
        return MicroBatch(
            ids_BS=self.ids_BS.pin_memory(),
            attention_BS=self.attention_BS.pin_memory(),
            labels_BS=self.labels_BS.pin_memory(),
            real_tokens=self.real_tokens,
            predicted_tokens=self.predicted_tokens,
        )


class MicroBatchSource(Dataset[MicroBatch]):
    """The micro-batches of one rank, by number: any one can be made at any time, so resuming is starting later."""

    def __init__(self, dataset: TokenDataset, config: TrainConfig, plan: BatchPlan, rank: int) -> None:
        self._dataset = dataset
        self._plan = plan
        self._rank = rank
        self._seed = config.seed
        self._seq_length = config.seq_length_tokens
        self._special = dataset.manifest.special_ids
        self._rule = MaskingRule(
            vocab_size=dataset.manifest.vocab_size,
            mask_id=self._special.mask,
            special_ids=self._special.all(),
            probability=config.masking_probability,
        )

    def __getitem__(self, micro_step: int) -> MicroBatch:
        return self.assemble(self._plan.rows(micro_step, self._rank))

    def assemble(self, rows: RowPlan) -> MicroBatch:
        """Read, frame, corrupt and pad the rows of a plan; missing rows stay empty and weigh nothing."""
        shape = (self._plan.rows_per_microbatch_per_rank, self._seq_length)
        ids = np.full(shape, self._special.pad, dtype=np.int64)
        attention = np.zeros(shape, dtype=np.int64)
        attention[:, 0] = 1  # a softmax over nothing would be NaN; in an empty row this one pad token weighs nothing
        labels = np.full(shape, IGNORED_LABEL, dtype=np.int64)
        real_tokens = 0
        for row, (epoch, sample) in enumerate(zip(rows.epochs, rows.samples, strict=True)):
            body = self._dataset.read(int(sample), self._seq_length - 2)
            framed = np.concatenate(([self._special.cls], body.astype(np.int64), [self._special.sep]))
            corrupted, targets = mask_tokens(framed, self._rule, seed=self._seed, epoch=int(epoch), sample=int(sample))
            ids[row, : len(framed)] = corrupted
            attention[row, : len(framed)] = 1
            labels[row, : len(framed)] = targets
            real_tokens += len(framed)
        return MicroBatch(
            ids_BS=torch.from_numpy(ids),
            attention_BS=torch.from_numpy(attention),
            labels_BS=torch.from_numpy(labels),
            real_tokens=real_tokens,
            predicted_tokens=int((labels != IGNORED_LABEL).sum()),
        )


def make_loader(source: MicroBatchSource, config: TrainConfig, micro_steps: range) -> DataLoader[MicroBatch]:
    """A loader over a range of micro-steps, with the configured processes and prefetching."""
    workers = config.data.loader_workers
    return DataLoader(
        source,
        batch_size=None,  # an item is a whole micro-batch already
        sampler=micro_steps,
        num_workers=workers,
        prefetch_factor=config.data.prefetch_batches if workers else None,
        pin_memory=config.data.pin_memory and config.device == "cuda",
    )
