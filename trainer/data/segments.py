"""Segments of sequences: samples, and the positions in sequences at which they lie."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.array_types import Int64


class _Row(enum.IntEnum):
    """Rows of the table of ``Segments``; the property of the same name describes each.

    The values are indices of rows.
    """

    SEQUENCES = 0
    POSITIONS = 1
    EPOCHS = 2
    SAMPLES = 3
    SHARDS = 4
    BEGINS = 5
    TOKENS = 6


@dataclass(frozen=True, slots=True)
class Segments:
    """N segments: one sample each, with its position in a sequence.

    Every property is an array of shape (N,), with one element per segment. They are
    views of one table, so assigning to their elements changes the table; only the
    table itself cannot be replaced.
    """

    table: Int64
    """Shape (7, N), one row per property. A single array is cheaper to send to a
    DataLoader worker than many small ones."""

    @classmethod
    def from_arrays(
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
        """Return segments with copies of the arrays that the properties describe."""
        rows = {
            _Row.SEQUENCES: sequences,
            _Row.POSITIONS: positions,
            _Row.EPOCHS: epochs,
            _Row.SAMPLES: samples,
            _Row.SHARDS: shards,
            _Row.BEGINS: begins,
            _Row.TOKENS: tokens,
        }
        return cls(np.stack([rows[row] for row in _Row]))

    @classmethod
    def join(cls, parts: Sequence["Segments"]) -> "Segments":
        """Concatenate copies of parts, in order; without parts the result is empty."""
        empty = np.zeros((len(_Row), 0), dtype=np.int64)
        return cls(np.concatenate([empty, *(part.table for part in parts)], axis=1))

    def copy(self) -> "Segments":
        """Return a copy, which shares no element with these segments."""
        return Segments(self.table.copy())

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self.table[0])

    def __getitem__(
        self, selected: "slice | npt.NDArray[np.bool_] | Int64"
    ) -> "Segments":
        """Return some of the segments.

        As in numpy, those of a slice are a view of this table, and those of a mask or
        of an array of indices are a copy.
        """
        return Segments(self.table[:, selected])

    @property
    def sequences(self) -> Int64:
        """Number of the sequence that holds each sample.

        Each function that returns segments states from where it counts sequences.
        """
        return self._row(_Row.SEQUENCES)

    @property
    def positions(self) -> Int64:
        """Position of each sample's [CLS] in its sequence."""
        return self._row(_Row.POSITIONS)

    @property
    def epochs(self) -> Int64:
        """Epoch of each sample, counted from 0."""
        return self._row(_Row.EPOCHS)

    @property
    def samples(self) -> Int64:
        """Index of each sample in the dataset."""
        return self._row(_Row.SAMPLES)

    @property
    def shards(self) -> Int64:
        """Shard that holds each sample's ids."""
        return self._row(_Row.SHARDS)

    @property
    def begins(self) -> Int64:
        """Index in the shard of each sample's first id."""
        return self._row(_Row.BEGINS)

    @property
    def tokens(self) -> Int64:
        """Number of each sample's ids, special tokens not counted."""
        return self._row(_Row.TOKENS)

    def _row(self, row: _Row) -> Int64:
        values: Int64 = self.table[row]
        return values
