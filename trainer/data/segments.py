"""Samples of sequences, and where each begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.array_types import Int64

_COLUMNS = 7


@dataclass(frozen=True, slots=True)
class Segments:
    """Samples with their positions in sequences.

    Every property is an array of shape (N,), with one element per sample. They are
    views of one table: assigning to their elements changes it.
    """

    table: Int64
    """Shape (7, N), one column of ``from_columns`` after the other. A single array is
    cheaper to send to a DataLoader worker than many small ones."""

    @classmethod
    def from_columns(
        cls,
        *,
        sequences: Int64,
        positions: Int64,
        epochs: Int64,
        samples: Int64,
        shards: Int64,
        begins: Int64,
        tokens: Int64,
    ) -> "Segments":
        """Return a table of columns, which are described at the properties."""
        columns = [sequences, positions, epochs, samples, shards, begins, tokens]
        return cls(np.stack(columns))

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """Concatenate parts, in order."""
        # Without parts, the result is empty.
        empty = np.zeros((_COLUMNS, 0), dtype=np.int64)
        return cls(np.concatenate([empty, *(part.table for part in parts)], axis=1))

    def __len__(self) -> int:
        return len(self.table[0])

    def __getitem__(
        self, chosen: "slice | npt.NDArray[np.bool_] | Int64"
    ) -> "Segments":
        return Segments(self.table[:, chosen])

    @property
    def sequences(self) -> Int64:
        """Sequence of each sample; each function states its first number."""
        return self._column(0)

    @property
    def positions(self) -> Int64:
        """Position of each sample's [CLS] in its sequence."""
        return self._column(1)

    @property
    def epochs(self) -> Int64:
        """Epoch of each sample, counted from 0."""
        return self._column(2)

    @property
    def samples(self) -> Int64:
        """Index of each sample in the dataset."""
        return self._column(3)

    @property
    def shards(self) -> Int64:
        """Shard that holds each sample's ids."""
        return self._column(4)

    @property
    def begins(self) -> Int64:
        """Index in the shard of each sample's first id."""
        return self._column(5)

    @property
    def tokens(self) -> Int64:
        """Number of each sample's ids, special tokens not counted."""
        return self._column(6)

    def _column(self, number: int) -> Int64:
        column: Int64 = self.table[number]
        return column
