"""Numbers of slots and segments, fixed so that micro-batches have the same shapes.

A slot is a position that the sparse MLM head or the sparse last layer computes. A
segment of varlen attention is a document or the padding of a sequence.
"""

import math
from dataclasses import dataclass

import torch

from trainer.data.head_slots import (
    fixed_slots,
    head_slots,
    round_up,
    sufficient_slots,
)
from trainer.data.micro_batch import MicroBatch
from trainer.formats.train_config import TrainConfig

_SEGMENTS_MULTIPLE = 64
"""Multiple to which the number of documents is rounded up, so that few shapes occur."""
_DOCUMENT_SIGMAS = 6
"""Standard deviations by which the reserved number of documents exceeds the expected
one: one micro-batch in a billion has more, if their numbers are normal."""


@dataclass(slots=True, kw_only=True)
class FixedSizes:
    """Numbers of slots and segments that micro-batches hardly exceed.

    A micro-batch that exceeds a number gets the smallest sufficient multiple of it, so
    that few different shapes occur.
    """

    slots: int | None
    """Slots of the head for a micro-batch; None if shapes may change."""
    sequence_slots: int | None
    """Slots of the sparse last layer for each sequence; None if shapes may change."""
    is_packed: bool
    """True if a sequence may have several documents."""
    segments: int | None = None
    """Segments of a micro-batch; None before the first one."""
    overflows: int = 0
    """Number of times that ``slots`` or ``segments`` did not suffice.

    A micro-batch that exceeds both is counted twice. ``sequence_slots`` are not
    counted."""

    @classmethod
    def from_config(cls, config: TrainConfig) -> "FixedSizes":
        """Return the sizes of a training, before its first micro-batch."""
        slots = fixed_slots(config)
        sequence_slots: int | None = None
        if slots is not None:
            sequence_slots = head_slots(
                config.seq_length_tokens, config.masking_probability
            )
        return cls(
            slots=slots,
            sequence_slots=sequence_slots,
            is_packed=config.layout == "packed",
        )

    def expect_documents(self, batch: MicroBatch) -> None:
        """Fix a number of segments for micro-batches packed as unevenly as this one.

        Args:
            batch: A micro-batch of the training, on the CPU.
        """
        sequences, width = batch.ids_BS.shape
        documents_B = torch.bincount(batch.starts_N // width, minlength=sequences)
        deviation = float(documents_B.float().std(correction=0))
        self.segments = self._max_segments(batch, deviation)

    def segments_for(self, batch: MicroBatch) -> int:
        """Return a sufficient number of segments, and count an overflow.

        The first micro-batch fixes the number, unless ``expect_documents`` has.

        Args:
            batch: The micro-batch, on any device.
        """
        if self.segments is None:
            # Its deviation is not computed, as that would wait for the device.
            self.segments = self._max_segments(batch, deviation=0.0)
        needed = len(batch.segment_edges) - 1
        if needed > self.segments:
            self.overflows += 1
        return round_up(needed, self.segments)

    def count_slots(self, batch: MicroBatch) -> None:
        """Count an overflow if a micro-batch has more tokens to predict than slots."""
        if self.slots is not None and batch.predicted_tokens > self.slots:
            self.overflows += 1

    def sequence_slots_for(self, needed: int) -> int:
        """Return a sufficient number of slots for each sequence.

        Args:
            needed: Largest number of tokens to predict in one sequence.

        Returns:
            The number, at least 1.
        """
        return sufficient_slots(needed, self.sequence_slots)

    def _max_segments(self, batch: MicroBatch, deviation: float) -> int:
        """Return a number of segments that micro-batches hardly exceed.

        Args:
            batch: One of the micro-batches.
            deviation: Standard deviation of the number of documents in a sequence.
        """
        documents = len(batch.starts_N)
        sequences = batch.ids_BS.shape[0]
        if not self.is_packed:
            return 2 * sequences  # a document in each sequence, and perhaps padding
        # One batch may be packed evenly by chance, so the deviation is taken to be at
        # least half the mean. The deviation of the sum over sequences grows with the
        # root of their number.
        deviation = max(deviation, documents / sequences / 2)
        max_documents = documents + _DOCUMENT_SIGMAS * deviation * math.sqrt(sequences)
        # The padding of each sequence is one more segment.
        return round_up(round(max_documents), _SEGMENTS_MULTIPLE) + sequences
