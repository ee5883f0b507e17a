"""Query positions of the sparse last layer, and their attention.

Each way of attention has a class here: ``DocumentQueries`` for varlen kernels,
``SequenceQueries`` for whole sequences under a mask.

Shapes: B sequences, S positions of a sequence, N documents, H heads, E dimensions of a
head, K slots of the MLM head, R slots of a sequence.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from trainer.data.masking import IGNORED_LABEL
from trainer.data.micro_batch import MicroBatch
from trainer.model.encoder_inputs import (
    EncoderInputs,
    additive_mask,
    edges_with_empty_segments,
)
from trainer.model.varlen import attend_documents, unjoin_heads
from trainer.model.varlen_kernels import VarlenKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentQueries:
    """Query positions for attention document by document.

    All keys and queries of a micro-batch are in one flattened sequence, ordered by
    document.
    """

    position_K: torch.Tensor
    """Positions in the flattened sequences, int64, ascending."""
    query_edges: torch.Tensor
    """Number of query positions before each of ``key_edges``, int32."""
    key_edges: torch.Tensor
    """Edges of documents in the flattened sequences, int32."""
    max_query_length: int
    """Upper bound of the query positions in a document."""
    max_key_length: int
    """Upper bound of the tokens of a document."""
    kernels: VarlenKernels | None
    """Kernels of forward and backward; None for torch's varlen attention."""

    def attend(
        self,
        query_KHE: torch.Tensor,
        key_BSHE: torch.Tensor,
        value_BSHE: torch.Tensor,
        *,
        dropout: float,
        key_value_BSD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of the query positions over their documents; (K, H, E).

        Args:
            query_KHE: Queries.
            key_BSHE: Keys of all positions.
            value_BSHE: Values of all positions.
            dropout: Dropout of attention weights, which must be 0.
            key_value_BSD: Keys and values as one matmul made them, if it did.
        """
        assert not dropout, "varlen does not support dropout"
        joined = [query_KHE.unsqueeze(1)]
        if key_value_BSD is not None:
            joined.append(unjoin_heads(key_value_BSD, query_KHE))
        else:
            separate = (key_BSHE, value_BSHE)
            joined += [tensor.flatten(0, 1).unsqueeze(1) for tensor in separate]
        return attend_documents(
            joined,
            query_edges=self.query_edges,
            key_edges=self.key_edges,
            max_query_length=self.max_query_length,
            max_key_length=self.max_key_length,
            kernels=self.kernels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceQueries:
    """Query positions for attention over whole sequences under a mask.

    Queries are computed for the K slots of the head, and attend in a table of R slots
    for each sequence.
    """

    position_K: torch.Tensor
    """Positions in the flattened sequences, int64, ascending."""
    slot_K: torch.Tensor
    """Index of each position among B * R slots, int64; unused ones go to one more slot
    behind these."""
    mask_BRS: torch.Tensor
    """Additive mask, shape (B, 1, R, S)."""

    def attend(
        self,
        query_KHE: torch.Tensor,
        key_BSHE: torch.Tensor,
        value_BSHE: torch.Tensor,
        *,
        dropout: float,
        key_value_BSD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of the query positions over their documents; (K, H, E).

        Args:
            query_KHE: Queries.
            key_BSHE: Keys of all positions.
            value_BSHE: Values of all positions.
            dropout: Dropout of attention weights.
            key_value_BSD: Ignored.
        """
        sequences, _, slots, _ = self.mask_BRS.shape
        # One more slot takes the queries of unused slots of the head.
        empty = query_KHE.new_zeros((sequences * slots + 1, *query_KHE.shape[1:]))
        query_BRHE = empty.index_copy(0, self.slot_K, query_KHE)[:-1].unflatten(
            0, (sequences, slots)
        )
        attended_BHRE = functional.scaled_dot_product_attention(
            query_BRHE.transpose(1, 2),
            key_BSHE.transpose(1, 2),
            value_BSHE.transpose(1, 2),
            attn_mask=self.mask_BRS,
            dropout_p=dropout,
        )
        # Unused slots of the head get zeros, from one more slot behind the others.
        attended = functional.pad(
            attended_BHRE.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1)
        )
        return attended.index_select(0, self.slot_K)


LastLayerQueries = SequenceQueries | DocumentQueries


def document_queries(
    inputs: EncoderInputs, batch: MicroBatch, kernels: VarlenKernels | None
) -> DocumentQueries:
    """Return the queries of the sparse last layer by document.

    Args:
        inputs: Inputs of the encoder, with edges of documents.
        batch: The micro-batch.
        kernels: Kernels of fa4; None for varlen.
    """
    assert inputs.edges is not None
    position_K = batch.slot_position_K
    slots = len(position_K)
    query_edges = edges_with_empty_segments(
        batch.slot_edges, len(inputs.edges) - 1, end=slots
    )
    max_key_length = batch.ids_BS.shape[1]
    # Each position may be one to predict. Unused slots are spread evenly, so a position
    # has at most slots / positions of them, rounded up.
    queries_per_position = 1 + (1 + slots // batch.ids_BS.numel())
    return DocumentQueries(
        position_K=position_K,
        query_edges=query_edges,
        key_edges=inputs.edges,
        max_query_length=min(slots, queries_per_position * max_key_length),
        max_key_length=max_key_length,
        kernels=kernels,
    )


def sequence_queries(
    batch: MicroBatch, *, sequence_slots: int, dtype: torch.dtype
) -> SequenceQueries:
    """Return the queries of the sparse last layer for whole sequences under a mask.

    Args:
        batch: The micro-batch.
        sequence_slots: Slots of each sequence: enough for the tokens to predict of any.
        dtype: Type of the mask.
    """
    slot_K = _slots_in_sequences(batch, sequence_slots)
    begin_BS = batch.begin_BS()
    begin_BR = _begins_of_slots(begin_BS, batch, slot_K, sequence_slots)
    is_allowed_BRS = begin_BR[:, :, None] == begin_BS[:, None, :]
    return SequenceQueries(
        position_K=batch.slot_position_K,
        slot_K=slot_K,
        mask_BRS=additive_mask(is_allowed_BRS, dtype),
    )


def _slots_in_sequences(batch: MicroBatch, sequence_slots: int) -> torch.Tensor:
    """Return the index of each slot of the head among B * R slots, int64, shape (K,).

    The positions to predict of a sequence fill its first slots.
    """
    sequences, width = batch.ids_BS.shape
    is_used_K = batch.slot_label_K != IGNORED_LABEL
    number_K = is_used_K.cumsum(0) - 1
    sequence_K = batch.slot_position_K // width
    # Number of the first position to predict in the same sequence.
    first_number_K = torch.searchsorted(
        batch.predicted_P.to(torch.int64), sequence_K * width
    )
    return torch.where(
        is_used_K,
        sequence_K * sequence_slots + number_K - first_number_K,
        sequences * sequence_slots,
    )


def _begins_of_slots(
    begin_BS: torch.Tensor,
    batch: MicroBatch,
    slot_K: torch.Tensor,
    sequence_slots: int,
) -> torch.Tensor:
    """Return where the segment begins that each slot attends to, shape (B, R)."""
    sequences = begin_BS.shape[0]
    # An unused slot attends as its sequence's first position does, as a softmax over
    # nothing would be NaN.
    first_begins = begin_BS[:, :1].expand(sequences, sequence_slots).flatten()
    begins = torch.cat([first_begins, begin_BS.new_zeros(1)])
    begins = begins.index_copy(0, slot_K, begin_BS.flatten()[batch.slot_position_K])
    begin_BR: torch.Tensor = begins[:-1].unflatten(0, (sequences, sequence_slots))
    return begin_BR
