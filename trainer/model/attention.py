"""Attention within documents: no cross-document attention in a packed sequence.

``varlen`` computes each document separately in one kernel, on Ampere and newer GPUs; ``sdpa`` computes whole sequences
under a mask, on any device; ``row``, for other architectures, uses transformers' own padding mask.

Shapes: B sequences of a micro-batch, S positions of a sequence, T = B * S, N documents, H heads, E dimensions of a
head, K slots of the MLM head, R slots of a sequence.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import current_flash_attention_impl
from transformers import PretrainedConfig

from trainer.config.train_config import TrainConfig
from trainer.data.loader import MicroBatch
from trainer.errors import BadConfig
from trainer.model.families import FAMILIES
from trainer.model.sparse_last_layer import DocumentQueries, SequenceQueries, attend_documents

AttentionKind = Literal["varlen", "sdpa", "row"]

VARLEN_NAME = "varlen_documents"
"""Name under which transformers knows our attention function."""
_MOST_HEAD_DIMENSIONS = 256
"""Limit of FlashAttention 2's kernels, which also require a multiple of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """Kind of attention, with the reason for it."""

    kind: AttentionKind
    reason: str


def dropout_key(model_config: PretrainedConfig) -> str | None:
    """Return the key of the attention dropout in a model's config, BERT's or ModernBERT's, or None."""
    keys = ("attention_probs_dropout_prob", "attention_dropout")
    return next((key for key in keys if hasattr(model_config, key)), None)


def choose_attention(config: TrainConfig, model_config: PretrainedConfig, device: torch.device) -> ChosenAttention:
    """Return the kind of attention to use; raise ``BadConfig`` if the configured one is not possible."""
    if model_config.model_type not in FAMILIES:  # others may ignore the document mask
        if config.layout == "packed" or config.attention != "auto":
            raise BadConfig(
                f"{model_config.model_type!r} supports neither packed sequences nor a choice of attention",
                next_step="Use --set train.layout=bucketed --set train.attention=auto, or a bert, roberta or "
                "modernbert model.",
            )
        return ChosenAttention(kind="row", reason=f"padding mask of {model_config.model_type}")
    if config.attention == "sdpa":
        return ChosenAttention(kind="sdpa", reason="set by train.attention")
    against = _against_varlen(config, model_config, device)
    if against is None:
        return ChosenAttention(kind="varlen", reason="no cross-document attention")
    if config.attention == "varlen":
        raise BadConfig(f"train.attention = 'varlen' cannot be used: {against[0]}", next_step=against[1])
    return ChosenAttention(kind="sdpa", reason=against[0])


def _against_varlen(
    config: TrainConfig, model_config: PretrainedConfig, device: torch.device
) -> tuple[str, str] | None:
    """Return the reason why varlen cannot be used and the next step, or None if it can."""
    if config.device != "cuda":  # not the device's type: a model that is traced without a GPU is on no device
        return "varlen requires a GPU", "Use --set train.attention=sdpa."
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"varlen requires an Ampere or newer GPU, not {name}", "Use --set train.attention=sdpa."
    if config.precision != "bf16":
        return "varlen requires bf16", "Use --set train.precision=bf16, or --set train.attention=sdpa."
    dropout = float(getattr(model_config, dropout_key(model_config) or "", 0.0))
    if dropout > 0:
        return (
            f"varlen does not support attention dropout, and the model's is {dropout:g}",
            "Change the recipe with --set train.attention_dropout=0, or use --set train.attention=sdpa.",
        )
    head_dimensions = model_config.hidden_size // model_config.num_attention_heads
    if head_dimensions > _MOST_HEAD_DIMENSIONS or head_dimensions % 8:
        return f"varlen does not support a head dimension of {head_dimensions}", "Use --set train.attention=sdpa."
    # Packed sequences have empty documents, on which the backward pass of other kernels hangs: flash-attention #1254.
    if (active := current_flash_attention_impl()) not in (None, "FA2"):
        return (
            f"{active} is active, which can hang on empty documents, as packed sequences contain",
            "Call torch.nn.attention.restore_flash_attention_impl(), or use --set train.attention=sdpa.",
        )
    return None


def attend_within_documents(
    module: nn.Module,
    query_BHSE: torch.Tensor,
    key_BHSE: torch.Tensor,
    value_BHSE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,  # noqa: ANN401 - other arguments from transformers
) -> tuple[torch.Tensor, None]:
    """Return attention within documents of one long sequence, shape (1, T, H, E); transformers' signature."""
    if dropout or attention_mask is not None:
        raise ValueError("varlen attention supports neither dropout nor masks")
    query_THE, key_THE, value_THE = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_BHSE, key_BHSE, value_BHSE))
    attended_THE = attend_documents(
        query_THE,
        key_THE,
        value_THE,
        query_edges=cu_seq_lens_q,
        key_edges=cu_seq_lens_q,
        longest_query=max_length_q,
        longest_key=max_length_q,
        # transformers counts the token itself
        window_tokens=None if sliding_window is None else sliding_window - 1,
        scale=scaling,
    )
    return attended_THE.unsqueeze(0), None


def document_places(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of each position, int32, from 1, and its index in it, int64; both (B, S) and 0 on padding.

    Both are computed on the device, without synchronisation.
    """
    shape, device = batch.ids_BS.shape, batch.ids_BS.device
    starts_N = batch.starts_N.to(torch.int64)
    begins_T = torch.zeros(batch.ids_BS.numel(), dtype=torch.int32, device=device)
    begins_T.index_fill_(0, starts_N, 1)
    number_T = begins_T.cumsum(0, dtype=torch.int32)
    # Positions before the first document belong to a document 0 without tokens.
    none = torch.zeros(1, dtype=torch.int64, device=device)
    start_T = torch.cat([none, starts_N]).index_select(0, number_T)
    tokens_T = torch.cat([none, batch.tokens_N.to(torch.int64)]).index_select(0, number_T)
    place_T = torch.arange(len(number_T), device=device) - start_T
    real_T = place_T < tokens_T
    return torch.where(real_T, number_T, 0).reshape(shape), torch.where(real_T, place_T, 0).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """Arguments of an encoder's forward, and the tensors behind them."""

    arguments: dict[str, Any]
    document_BS: torch.Tensor | None = None
    """Document of each position; None if the encoder gets a padding mask instead."""
    edges: torch.Tensor | None = None
    """Edges of documents and sequences, int32, shape (2 N + B + 1,); only for varlen."""


def encoder_inputs(
    batch: MicroBatch, kind: AttentionKind, *, dtype: torch.dtype, first_position: int, window_tokens: int | None
) -> EncoderInputs:
    """Return the arguments that give an encoder the bounds of documents, so that it builds no mask.

    ``first_position`` is the position id of a document's first token: RoBERTa's begin after the padding id.
    ``window_tokens`` is the reach of sliding-window layers to either side; None without such layers.
    """
    if kind == "row":
        arguments: dict[str, Any] = {"input_ids": batch.wide_ids_BS(), "attention_mask": batch.attention_BS()}
        return EncoderInputs(arguments=arguments)
    document_BS, position_BS = document_places(batch)
    positions_BS = position_BS + first_position
    if kind == "varlen":
        edges = _document_edges(batch)
        arguments = {
            "input_ids": batch.wide_ids_BS().reshape(1, -1),
            "position_ids": positions_BS.reshape(1, -1),
            "cu_seq_lens_q": edges,
            "max_length_q": batch.ids_BS.shape[1],
        }
        return EncoderInputs(arguments=arguments, document_BS=document_BS, edges=edges)
    mask_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    mask: Any = _additive(mask_BSS, dtype)
    if window_tokens is not None:
        place_S = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device)
        near_SS = (place_S[:, None] - place_S[None, :]).abs() <= window_tokens
        mask = {"full_attention": mask, "sliding_attention": _additive(mask_BSS & near_SS, dtype)}
    arguments = {"input_ids": batch.wide_ids_BS(), "position_ids": positions_BS, "attention_mask": mask}
    return EncoderInputs(arguments=arguments, document_BS=document_BS)


def document_queries(inputs: EncoderInputs, batch: MicroBatch, position_K: torch.Tensor) -> DocumentQueries:
    """Return the queries of the sparse last layer for varlen; ``position_K`` is ascending."""
    assert inputs.edges is not None
    seq_length_tokens = batch.ids_BS.shape[1]
    return DocumentQueries(
        position_K=position_K,
        query_edges=torch.searchsorted(position_K, inputs.edges, out_int32=True),
        key_edges=inputs.edges,
        # Unused slots are spread evenly, so no document gets more of them than it has positions.
        most_queries=min(len(position_K), 2 * seq_length_tokens),
        most_keys=seq_length_tokens,
    )


def sequence_queries(
    inputs: EncoderInputs, batch: MicroBatch, position_K: torch.Tensor, *, sequence_slots: int, dtype: torch.dtype
) -> SequenceQueries:
    """Return the queries of the sparse last layer for whole sequences under a mask.

    ``position_K`` are the positions to predict, ascending, then those of unused slots. ``sequence_slots`` is at least
    the most tokens to predict in any sequence.
    """
    document_BS = inputs.document_BS
    assert document_BS is not None
    rows, width = batch.ids_BS.shape
    number_K = torch.arange(len(position_K), device=position_K.device)
    counts_K = number_K < batch.predicted_tokens
    row_K = position_K // width
    first_of_row_K = torch.searchsorted(torch.where(counts_K, position_K, rows * width), row_K * width)
    slot_K = torch.where(counts_K, row_K * sequence_slots + number_K - first_of_row_K, rows * sequence_slots)
    # An unused slot attends as its sequence's first position does, as a softmax over nothing would be NaN.
    none = document_BS.new_zeros(1)
    asking = torch.cat([document_BS[:, :1].expand(rows, sequence_slots).flatten(), none])
    asking_BR = asking.index_copy(0, slot_K, document_BS.flatten()[position_K])[:-1].unflatten(
        0, (rows, sequence_slots)
    )
    mask_BRS = _additive(asking_BR[:, :, None] == document_BS[:, None, :], dtype)
    return SequenceQueries(position_K=position_K, slot_K=slot_K, mask_BRS=mask_BRS)


def _additive(allowed_BSS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask, shape (B, 1, S, S): 0 for pairs that may attend, else minus infinity.

    Made once for all layers: from a boolean mask each layer would make its own. Every position may attend to itself.
    """
    zero = torch.zeros((), dtype=dtype, device=allowed_BSS.device)
    return torch.where(allowed_BSS, zero, -torch.inf).unsqueeze(1)


def _document_edges(batch: MicroBatch) -> torch.Tensor:
    """Return the edges of documents and sequences, ascending from 0 to T.

    Padding between documents attends to itself. The edges of sequences divide it, as kernels assume that no document
    is longer than a sequence, and leave positions outside all edges undefined.
    """
    rows, width = batch.ids_BS.shape
    rows_B = torch.arange(rows + 1, dtype=torch.int32, device=batch.ids_BS.device) * width
    starts_N, ends_N = batch.starts_N, batch.starts_N + batch.tokens_N
    return torch.cat([rows_B, starts_N.to(torch.int32), ends_N.to(torch.int32)]).sort().values
