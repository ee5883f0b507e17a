"""Inputs of an encoder that give it the bounds of documents.

The encoder builds a mask itself only for ``row``: its own mask knows the padding, but
not the documents of a sequence.

Shapes: B sequences of a micro-batch, S positions of a sequence, T = B * S, M segments,
which are documents or padding, D hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
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
            edges = edges_with_empty_segments(
                batch.segment_edges, segments, end=batch.ids_BS.numel()
            )
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
    begin_BS = batch.begin_BS()
    position_BS = _position_ids(batch, packing)
    arguments: dict[str, Any] = {"input_ids": ids_BS, "position_ids": position_BS}
    if packing.needs_embeddings:
        arguments["input_ids"] = None
        arguments["inputs_embeds"] = _embed(model, batch, ids_BS, position_BS)
    is_allowed_BSS = begin_BS[:, :, None] == begin_BS[:, None, :]
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
    return EncoderInputs(arguments=arguments)


def _segmented_inputs(
    batch: MicroBatch, packing: Packing, model: PreTrainedModel, edges: torch.Tensor
) -> EncoderInputs:
    """Return one long sequence with the edges of its segments."""
    ids_BS = batch.wide_ids_BS()
    ids_1T = ids_BS.reshape(1, -1)
    position_1T = _position_ids(batch, packing).reshape(1, -1)
    arguments: dict[str, Any] = {"input_ids": ids_1T, "position_ids": position_1T}
    if packing.needs_embeddings:
        arguments["input_ids"] = None
        arguments["inputs_embeds"] = _embed(model, batch, ids_1T, position_1T)
    arguments["cu_seq_lens_q"] = edges
    arguments["max_length_q"] = ids_BS.shape[1]
    return EncoderInputs(arguments=arguments, edges=edges)


def _position_ids(batch: MicroBatch, packing: Packing) -> torch.Tensor:
    """Return the position of each token in its document, int32, shape (B, S).

    Padding has positions too; no document attends to it.
    """
    if packing.first_position == 0:
        return batch.index_BS
    return batch.index_BS + packing.first_position


def _embed(
    model: PreTrainedModel,
    batch: MicroBatch,
    ids_BS: torch.Tensor,
    position_BS: torch.Tensor,
) -> torch.Tensor:
    """Return the result of the encoder's embedding layer, without a padding mask.

    Ids and positions have the shape that the encoder takes: (B, S) or (1, T).
    """
    encoder: Any = model.base_model
    embeds_BSD = encoder.get_input_embeddings()(ids_BS)
    if getattr(model.config, "token_dropout", False):
        is_mask_BS = ids_BS == model.config.mask_token_id
        scale_BS = _token_dropout_scale(is_mask_BS, batch)
        embeds_BSD = (embeds_BSD * scale_BS.unsqueeze(-1)).to(embeds_BSD.dtype)
    embedded_BSD: torch.Tensor = encoder.embeddings(
        inputs_embeds=embeds_BSD, position_ids=position_BS
    )
    return embedded_BSD


def _token_dropout_scale(is_mask_BS: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return ESM's token dropout as a factor for each embedding, fp32.

    ESM zeroes the embeddings of mask tokens and scales the others by
    (1 - _ESM_MASKED_SHARE) / (1 - share of mask tokens), as in ``EsmEmbeddings``. There
    the share is that of the whole sequence, here that of each document.
    """
    begin_BS = batch.begin_BS().to(torch.int64)
    masks_BS = is_mask_BS.reshape(begin_BS.shape).to(torch.float32)
    # A segment, which is a document or padding, is counted where it begins.
    zeros_BS = torch.zeros_like(masks_BS)
    mask_count_BS = zeros_BS.scatter_add(1, begin_BS, masks_BS)
    token_count_BS = zeros_BS.scatter_add(1, begin_BS, torch.ones_like(masks_BS))
    share_BS = (mask_count_BS / token_count_BS).gather(1, begin_BS)
    share_BS = share_BS.reshape(is_mask_BS.shape)
    return torch.where(is_mask_BS, 0.0, (1 - _ESM_MASKED_SHARE) / (1 - share_BS))


def edges_with_empty_segments(
    edges: torch.Tensor, segments: int, *, end: int
) -> torch.Tensor:
    """Return edges of a fixed number of segments, of which the last ones are empty.

    Args:
        edges: Edges of the segments, int32, shape (M + 1,).
        segments: Smallest number of segments.
        end: The last edge.

    Returns:
        The edges, int32, shape (max(segments, M) + 1,).
    """
    missing = max(0, segments + 1 - len(edges))
    return functional.pad(edges, (0, missing), value=end)


def additive_mask(is_allowed_BSS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask, shape (B, 1, S, S): 0 for allowed pairs, else -inf.

    One mask serves all layers: from a boolean mask, each layer would make its own.
    Every position must be allowed to attend to one at least, as a softmax over nothing
    is NaN.
    """
    zero = torch.zeros((), dtype=dtype, device=is_allowed_BSS.device)
    return torch.where(is_allowed_BSS, zero, -torch.inf).unsqueeze(1)
