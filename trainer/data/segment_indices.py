"""Indices that attention and the MLM head need, computed from the documents.

They are computed with the micro-batch, in DataLoader workers: on a GPU they would be
some thirty kernels more per micro-batch, which take longer to launch than to run.

A segment is a document or the padding between documents and ends of sequences.

Shapes: B sequences of a micro-batch, S positions of a sequence, T = B * S, N documents,
M segments, P tokens to predict, K slots of the head.
"""

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.array_types import Ids, Int64
from trainer.data.masking import IGNORED_LABEL

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentIndices:
    """Segments of a micro-batch."""

    edges: Int32
    """Edges of segments, ascending from 0 to T, shape (M + 1,). No segment is empty, or
    crosses the end of a sequence."""
    index_T: Int32
    """Index of each position in its segment."""


def segment_indices(
    starts_N: Int64, ends_N: Int64, *, sequences: int, width: int
) -> SegmentIndices:
    """Return the segments of a micro-batch.

    Padding has segments too, as kernels leave positions outside all segments undefined.
    No document attends to them.

    Args:
        starts_N: Start of each document in the flattened sequences.
        ends_N: Position behind each document.
        sequences: Number of sequences, B.
        width: Positions of each sequence, S.
    """
    is_edge = np.zeros(sequences * width + 1, dtype=np.bool_)
    is_edge[::width] = True
    is_edge[starts_N] = True
    is_edge[ends_N] = True
    edges = np.flatnonzero(is_edge).astype(np.int32)
    begin_T = np.repeat(edges[:-1], np.diff(edges))
    return SegmentIndices(edges=edges, index_T=_positions(len(begin_T)) - begin_T)


@functools.lru_cache(maxsize=8)
def _positions(count: int) -> Int32:
    """Return all positions, in ascending order, read-only as they are kept."""
    position_T = np.arange(count, dtype=np.int32)
    position_T.setflags(write=False)
    return position_T


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotIndices:
    """Slots of the MLM head, which are positions for which it computes logits."""

    position_K: Int64
    """Position of each slot in the flattened sequences, ascending."""
    label_K: Int64
    """Label of each slot; ``IGNORED_LABEL`` for unused ones."""
    edges: Int32
    """Number of slots before each edge of a segment, shape (M + 1,)."""


def slot_indices(
    predicted_P: Int64, targets_P: Ids, *, slots: int, segment_edges: Int32
) -> SlotIndices:
    """Give each slot of the head a position and a label.

    Unused slots are spread evenly over all positions.

    Args:
        predicted_P: Positions of the tokens to predict, ascending.
        targets_P: Ids of the tokens to predict.
        slots: Number of slots, K: enough for the tokens to predict.
        segment_edges: Edges of segments, as ``SegmentIndices.edges``.
    """
    unused = slots - len(predicted_P)
    last_position = int(segment_edges[-1]) - 1
    spread = np.arange(unused) * last_position // max(1, unused - 1)
    # Both are ascending, so that nothing needs to be sorted.
    unused_slots = np.searchsorted(predicted_P, spread) + np.arange(unused)
    is_used_K = np.ones(slots, dtype=np.bool_)
    is_used_K[unused_slots] = False
    position_K = np.empty(slots, dtype=np.int64)
    position_K[is_used_K] = predicted_P
    position_K[unused_slots] = spread
    label_K = np.full(slots, IGNORED_LABEL, dtype=np.int64)
    label_K[is_used_K] = targets_P
    return SlotIndices(
        position_K=position_K,
        label_K=label_K,
        edges=np.searchsorted(position_K, segment_edges).astype(np.int32),
    )
