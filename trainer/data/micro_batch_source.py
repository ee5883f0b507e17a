"""Source of micro-batches: it reads, frames, pads and masks the samples of a plan."""

import contextlib
import math

import numpy as np
from torch.utils.data import Dataset

from trainer.data.array_types import Ids, Int64
from trainer.data.batch_plan import SPECIAL_TOKENS_PER_SAMPLE, BatchPlan
from trainer.data.dataset import TokenDataset
from trainer.data.head_slots import fixed_slots
from trainer.data.masking import Masker
from trainer.data.micro_batch import MicroBatch
from trainer.data.sampler import MicroBatchPlan
from trainer.data.segments import Segments
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import TRIMMED_LAYOUTS, TrainConfig

WIDTH_STEP_TOKENS = 64
"""Multiple to which the width of ``bucketed`` micro-batches is rounded up: few shapes,
in tiles of Tensor Cores. ``dynamic`` ones are not rounded, as in transformers'
collator."""


class MicroBatchSource(Dataset[MicroBatch]):
    """Micro-batches of one rank, made from their plans.

    They are the same in any process, in any order.
    """

    def __init__(
        self, dataset: TokenDataset, config: TrainConfig, plan: BatchPlan
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._fixed_slots = fixed_slots(config)
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
        width = self._width_tokens(segments.tokens)
        # The sequences of a micro-batch are one flat array while it is filled.
        starts = segments.sequences * width + segments.positions
        ids = self._read_samples(segments, starts, width)
        predicted, targets = self._mask(ids, starts + 1, segments)
        return MicroBatch.from_samples(
            ids.reshape(-1, width),
            starts_N=starts,
            tokens_N=segments.tokens + SPECIAL_TOKENS_PER_SAMPLE,
            predicted_P=predicted,
            targets_P=targets,
            fixed_slots=self._fixed_slots,
            after=plan.after,
        )

    def _read_samples(self, segments: Segments, starts: Int64, width: int) -> Ids:
        """Return the flat ids of a micro-batch before masking.

        Each sample lies between [CLS], at its position in ``starts``, and [SEP].
        """
        ids = np.full(
            self._plan.sequences_per_micro_batch * width,
            self._special_ids.pad,
            dtype=self._dataset.dtype,
        )
        ids[starts] = self._special_ids.cls
        ids[starts + segments.tokens + 1] = self._special_ids.sep
        self._dataset.read_into(
            ids, starts + 1, segments.shards, segments.begins, segments.tokens
        )
        return ids

    def _width_tokens(self, tokens: Int64) -> int:
        """Return the number of positions of each sequence of a micro-batch."""
        width = self._plan.seq_length_tokens
        if self._plan.layout not in TRIMMED_LAYOUTS:
            return width
        longest = int(tokens.max(initial=0)) + SPECIAL_TOKENS_PER_SAMPLE
        if self._plan.layout == "bucketed":
            longest = math.ceil(longest / WIDTH_STEP_TOKENS) * WIDTH_STEP_TOKENS
        return min(width, longest)

    def _mask(self, ids: Ids, begins: Int64, segments: Segments) -> tuple[Int64, Ids]:
        """Mask the samples of ``ids`` in place.

        Returns:
            The positions to predict, ascending, and their original ids.

        Raises:
            BadConfig: If an id exceeds the vocabulary.
        """
        # Checked on the host, as a GPU would read past the end of the embedding table.
        if int(ids.max(initial=0)) < self._dataset.manifest.vocab_size:
            # The masker raises IndexError for an id above its vocabulary.
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
