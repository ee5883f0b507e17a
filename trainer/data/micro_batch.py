"""Micro-batch: the tensors with which one forward and backward pass is computed.

Ids are copied to the device in their small stored type, and widened there.

Shapes: B sequences of a micro-batch, S positions of a sequence, N samples in the
micro-batch, M segments, P tokens to predict, K slots of the MLM head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.data.array_types import Ids, Int64
from trainer.data.head_slots import sufficient_slots
from trainer.data.joined_tensors import JoinedTensors
from trainer.data.masking import IGNORED_LABEL
from trainer.data.position import Position
from trainer.data.segment_indices import segment_indices, slot_indices


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on the host, or, after ``to``, on a device."""

    tensors: JoinedTensors
    """The tensors, which are also attributes of this object."""
    non_padding_tokens: int
    """Tokens of all samples, special tokens included."""
    predicted_tokens: int
    """Number of tokens to predict."""
    most_predicted_in_sequence: int
    """Largest number of tokens to predict in one sequence."""
    padded_sequences: int
    """Sequences that end in padding; empty ones are padding only."""
    after: Position | None = None
    """Position of the job after this optimizer step; only with the last micro-batch of
    a step."""

    @classmethod
    def from_samples(
        cls,
        ids_BS: Ids,
        *,
        starts_N: Int64,
        tokens_N: Int64,
        predicted_P: Int64,
        targets_P: Ids,
        fixed_slots: int | None,
        after: Position | None = None,
    ) -> "MicroBatch":
        """Make a micro-batch of samples that lie in its sequences.

        The samples of a sequence follow one another from its first position on.

        Args:
            ids_BS: Ids with special tokens, masks and padding.
            starts_N: Start of each sample in the flattened sequences, ascending.
            tokens_N: Tokens of each sample, special tokens included.
            predicted_P: Positions of the tokens to predict in the flattened sequences,
                ascending.
            targets_P: Original ids of the tokens to predict.
            fixed_slots: Slots that the head has for a micro-batch, as
                ``head_slots.fixed_slots`` returns them.
            after: Position of the job after this optimizer step, with the last
                micro-batch of a step.
        """
        sequences, width = ids_BS.shape
        segments = segment_indices(
            starts_N, starts_N + tokens_N, sequences=sequences, width=width
        )
        slots = slot_indices(
            predicted_P,
            targets_P,
            slots=sufficient_slots(len(predicted_P), fixed_slots),
            segment_edges=segments.edges,
        )
        arrays = {
            "ids_BS": ids_BS,
            "starts_N": starts_N.astype(np.int32),
            "tokens_N": tokens_N.astype(np.int32),
            "predicted_P": predicted_P.astype(np.int32),
            "targets_P": targets_P,
            "segment_edges": segments.edges,
            "index_BS": segments.index_T.reshape(sequences, width),
            "slot_position_K": slots.position_K,
            "slot_label_K": slots.label_K,
            "slot_edges": slots.edges,
        }
        sequence_edges = np.arange(0, ids_BS.size + 1, width)
        return cls(
            tensors=JoinedTensors.join(arrays),
            non_padding_tokens=int(tokens_N.sum()),
            predicted_tokens=len(predicted_P),
            most_predicted_in_sequence=_most_per_sequence(predicted_P, sequence_edges),
            # Every other segment is the padding of a sequence.
            padded_sequences=len(segments.edges) - 1 - len(starts_N),
            after=after,
        )

    @property
    def ids_BS(self) -> torch.Tensor:
        """Ids, uint16 or uint32 as stored, with special tokens, masks and padding."""
        return self.tensors["ids_BS"]

    @property
    def starts_N(self) -> torch.Tensor:
        """Start of each sample in the flattened sequences, int32, ascending."""
        return self.tensors["starts_N"]

    @property
    def tokens_N(self) -> torch.Tensor:
        """Tokens of each sample, int32, special tokens included."""
        return self.tensors["tokens_N"]

    @property
    def predicted_P(self) -> torch.Tensor:
        """Positions of the tokens to predict in the flattened sequences, int32."""
        return self.tensors["predicted_P"]

    @property
    def targets_P(self) -> torch.Tensor:
        """Original ids of the tokens to predict, in the type of ``ids_BS``."""
        return self.tensors["targets_P"]

    @property
    def segment_edges(self) -> torch.Tensor:
        """Edges of segments, int32, shape (M + 1,), as ``SegmentIndices.edges``."""
        return self.tensors["segment_edges"]

    @property
    def index_BS(self) -> torch.Tensor:
        """Index of each position in its segment, int32."""
        return self.tensors["index_BS"]

    @property
    def slot_position_K(self) -> torch.Tensor:
        """Position of each slot of the head, int64, ascending."""
        return self.tensors["slot_position_K"]

    @property
    def slot_label_K(self) -> torch.Tensor:
        """Label of each slot of the head, int64; ``IGNORED_LABEL`` for unused ones."""
        return self.tensors["slot_label_K"]

    @property
    def slot_edges(self) -> torch.Tensor:
        """Number of slots before each of ``segment_edges``, int32, shape (M + 1,)."""
        return self.tensors["slot_edges"]

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy to a device, asynchronously if the memory is pinned."""
        return self._moved(lambda buffer: buffer.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Copy to page-locked memory; called by the DataLoader."""
        return self._moved(torch.Tensor.pin_memory)

    def _moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return a micro-batch whose buffer is the one that ``move`` returns."""
        return replace(self, tensors=self.tensors.moved(move))

    def begin_BS(self) -> torch.Tensor:
        """Return the position in its sequence at which each position's segment begins.

        It is int32, and tells the segments of a sequence apart.
        """
        index_BS = self.index_BS
        position_S = torch.arange(
            index_BS.shape[1], dtype=index_BS.dtype, device=index_BS.device
        )
        return position_S - index_BS

    def wide_ids_BS(self) -> torch.Tensor:
        """Return the ids as int64, which embeddings require."""
        return self.ids_BS.to(torch.int64)

    def attention_BS(self) -> torch.Tensor:
        """Return the padding mask, int64, 1 for non-padding tokens.

        The layout must have one sample per sequence.
        """
        sequences, width = self.ids_BS.shape
        device = self.ids_BS.device
        # An empty sequence gets length 1: its first padding token is attended to, as a
        # softmax over no token would be NaN. That token adds no loss.
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


def _most_per_sequence(predicted_P: Int64, sequence_edges: Int64) -> int:
    """Return the number of positions to predict in the sequence that has most.

    ``predicted_P`` is ascending, so bisection finds the number of positions before each
    edge; the differences are those inside each sequence.
    """
    predicted_before_edge = np.searchsorted(predicted_P, sequence_edges)
    return int((predicted_before_edge[1:] - predicted_before_edge[:-1]).max())
