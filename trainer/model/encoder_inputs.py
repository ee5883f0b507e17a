"""Inputs of an encoder that give it the bounds of documents.

The encoder builds a mask itself only for ``row``: its own mask knows the padding, but
not the documents of a sequence.

Shapes: B sequences of a micro-batch, S positions of a sequence, T = B * S, N documents,
D hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from trainer.data.micro_batch import MicroBatch
from trainer.model.attention import AttentionKind, Packing
from trainer.model.varlen_kernels import VarlenKernels

_ESM_MASKED_SHARE = 0.15 * 0.8
"""Share of tokens that ESM's own pre-training replaced by the mask token: 80 % of the
15 % to predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """Arguments of an encoder's forward, and the tensors behind them."""

    arguments: dict[str, Any]
    """Keyword arguments of the encoder's forward."""
    document_BS: torch.Tensor | None = None
    """Document of each position, as ``document_positions`` returns it; only for
    sdpa."""
    edges: torch.Tensor | None = None
    """Edges of documents and of padding, int32, ascending; only for varlen and fa4."""


def encoder_inputs(
    batch: MicroBatch,
    kind: AttentionKind,
    packing: Packing,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    window_tokens: int | None,
    segments: int = 0,
    kernels: VarlenKernels | None = None,
) -> EncoderInputs:
    """Return the inputs of an encoder for a kind of attention.

    Args:
        batch: The micro-batch.
        kind: Kind of attention.
        packing: Way in which the architecture takes packed sequences.
        model: The model, for its embeddings.
        dtype: Type of additive masks.
        window_tokens: Reach of sliding-window layers to either side; None without such
            layers.
        segments: Smallest number of segments for varlen and fa4, which add empty ones
            up to it.
        kernels: Kernels of fa4; None for other kinds.
    """
    match kind:
        case "row":
            return EncoderInputs(
                arguments={
                    "input_ids": batch.wide_ids_BS(),
                    "attention_mask": batch.attention_BS(),
                }
            )
        case "sdpa":
            return _masked_inputs(
                batch, packing, model, dtype=dtype, window_tokens=window_tokens
            )
        case "varlen" | "fa4":
            edges = document_edges(batch, segments)
            inputs = _segmented_inputs(batch, packing, model, edges)
            if kernels is not None:
                inputs.arguments["varlen_kernels"] = kernels
            return inputs


def _masked_inputs(
    batch: MicroBatch,
    packing: Packing,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    window_tokens: int | None,
) -> EncoderInputs:
    """Return whole sequences with masks."""
    ids_BS = batch.wide_ids_BS()
    document_BS, index_BS = document_positions(batch)
    position_BS = index_BS + packing.first_position
    arguments: dict[str, Any] = {"input_ids": ids_BS, "position_ids": position_BS}
    if packing.needs_embeddings:
        arguments["input_ids"] = None
        arguments["inputs_embeds"] = _embed(
            model, ids_BS, position_BS, document_BS, documents=len(batch.starts_N)
        )
    is_allowed_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    mask: Any = additive_mask(is_allowed_BSS, dtype)
    if window_tokens is not None:
        position_S = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device)
        distance_SS = (position_S[:, None] - position_S[None, :]).abs()
        is_near_SS = distance_SS <= window_tokens
        # ModernBERT chooses a mask for each layer by these names.
        mask = {
            "full_attention": mask,
            "sliding_attention": additive_mask(is_allowed_BSS & is_near_SS, dtype),
        }
    arguments["attention_mask"] = mask
    return EncoderInputs(arguments=arguments, document_BS=document_BS)


def _segmented_inputs(
    batch: MicroBatch, packing: Packing, model: PreTrainedModel, edges: torch.Tensor
) -> EncoderInputs:
    """Return one long sequence with the edges of its segments."""
    ids_BS = batch.wide_ids_BS()
    index_T = torch.arange(ids_BS.numel(), dtype=torch.int32, device=edges.device)
    segment_T = torch.searchsorted(edges, index_T, right=True, out_int32=True) - 1
    begin_T = edges.index_select(0, segment_T)
    # Padding has positions too, in segments of its own that no document attends to.
    position_T = (index_T - begin_T + packing.first_position).to(torch.int64)
    ids_1T = ids_BS.reshape(1, -1)
    position_1T = position_T.unsqueeze(0)
    arguments: dict[str, Any] = {"input_ids": ids_1T, "position_ids": position_1T}
    if packing.needs_embeddings:
        document_BS, _ = document_positions(batch)
        arguments["input_ids"] = None
        arguments["inputs_embeds"] = _embed(
            model,
            ids_1T,
            position_1T,
            document_BS.reshape(1, -1),
            documents=len(batch.starts_N),
        )
    arguments["cu_seq_lens_q"] = edges
    arguments["max_length_q"] = ids_BS.shape[1]
    return EncoderInputs(arguments=arguments, edges=edges)


def _embed(
    model: PreTrainedModel,
    ids_BS: torch.Tensor,
    position_BS: torch.Tensor,
    document_BS: torch.Tensor,
    *,
    documents: int,
) -> torch.Tensor:
    """Return the result of the encoder's embedding layer, without a padding mask."""
    encoder: Any = model.base_model
    embeds_BSD = encoder.get_input_embeddings()(ids_BS)
    if getattr(model.config, "token_dropout", False):
        is_mask_BS = ids_BS == model.config.mask_token_id
        scale_BS = _token_dropout_scale(is_mask_BS, document_BS, documents)
        embeds_BSD = (embeds_BSD * scale_BS.unsqueeze(-1)).to(embeds_BSD.dtype)
    embedded_BSD: torch.Tensor = encoder.embeddings(
        inputs_embeds=embeds_BSD, position_ids=position_BS
    )
    return embedded_BSD


def _token_dropout_scale(
    is_mask_BS: torch.Tensor, document_BS: torch.Tensor, documents: int
) -> torch.Tensor:
    """Return ESM's token dropout as a factor for each embedding, fp32, shape (B, S).

    ESM zeroes the embeddings of mask tokens and scales the others by
    (1 - _ESM_MASKED_SHARE) / (1 - share of mask tokens), as in ``EsmEmbeddings``. There
    the share is that of the whole sequence, here that of each document.
    """
    # Mask tokens and all tokens of each document; document 0 is the padding.
    counts_N2 = is_mask_BS.new_zeros((documents + 1, 2), dtype=torch.float32)
    ones_BS = torch.ones_like(is_mask_BS)
    counts_N2.index_add_(
        0,
        document_BS.flatten(),
        torch.stack([is_mask_BS, ones_BS], -1).flatten(0, 1).float(),
    )
    share_BS = (counts_N2[:, 0] / counts_N2[:, 1])[document_BS]
    return torch.where(is_mask_BS, 0.0, (1 - _ESM_MASKED_SHARE) / (1 - share_BS))


def document_positions(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of each position, and the position's index in it.

    Documents are int32 and counted from 1, indices int64. Both have shape (B, S) and
    are 0 on padding.
    """
    shape = batch.ids_BS.shape
    device = batch.ids_BS.device
    starts_N = batch.starts_N.to(torch.int64)
    begins_T = torch.zeros(batch.ids_BS.numel(), dtype=torch.int32, device=device)
    begins_T.index_fill_(0, starts_N, 1)
    document_T = begins_T.cumsum(0, dtype=torch.int32)
    # Positions before the first document belong to a document 0 without tokens.
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    start_T = torch.cat([zero, starts_N]).index_select(0, document_T)
    tokens_N = batch.tokens_N.to(torch.int64)
    tokens_T = torch.cat([zero, tokens_N]).index_select(0, document_T)
    index_T = torch.arange(len(document_T), device=device) - start_T
    is_token_T = index_T < tokens_T
    document_BS = torch.where(is_token_T, document_T, 0).reshape(shape)
    index_BS = torch.where(is_token_T, index_T, 0).reshape(shape)
    return document_BS, index_BS


def document_edges(batch: MicroBatch, segments: int) -> torch.Tensor:
    """Return the edges of documents and of padding, ascending from 0 to T.

    Padding behind a sequence's documents attends to itself, as kernels leave positions
    outside all edges undefined, and assume that no segment is longer than a sequence.
    Segments are empty only at the end.

    Args:
        batch: The micro-batch.
        segments: Smallest number of segments; empty ones are added up to it.

    Returns:
        The edges, int32, shape (max(segments, N + B) + 1,).
    """
    sequences, width = batch.ids_BS.shape
    positions = sequences * width
    documents = len(batch.starts_N)
    begin_B = width * torch.arange(
        sequences, dtype=torch.int32, device=batch.ids_BS.device
    )
    # Padding begins where the last document of its sequence ends.
    sequence_N = (batch.starts_N // width).to(torch.int64)
    padding_B = begin_B.scatter_reduce(
        0, sequence_N, batch.starts_N + batch.tokens_N, "amax"
    )
    # A full sequence has none: its edge moves to the end.
    padding_B.masked_fill_(padding_B >= begin_B + width, positions)
    empty_segments = max(segments - documents - sequences, 0)
    ends = begin_B.new_full((empty_segments + 1,), positions)
    return torch.cat([batch.starts_N, padding_B, ends]).sort().values


def additive_mask(is_allowed_BSS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask, shape (B, 1, S, S): 0 for allowed pairs, else -inf.

    One mask serves all layers: from a boolean mask, each layer would make its own.
    Every position must be allowed to attend to one at least, as a softmax over nothing
    is NaN.
    """
    zero = torch.zeros((), dtype=dtype, device=is_allowed_BSS.device)
    return torch.where(is_allowed_BSS, zero, -torch.inf).unsqueeze(1)
