"""Attention within documents: no cross-document attention in a packed sequence.

``varlen`` computes each document separately in one kernel, on Ampere and newer GPUs;
``fa3`` does so on Hopper, in that of FlashAttention 3. ``sdpa`` computes whole
sequences under a mask, on any device; ``row``, for architectures that cannot be packed,
uses transformers' own padding mask.

Shapes: B sequences of a micro-batch, S positions of a sequence, T = B * S, N documents,
H heads, E dimensions of a head, K slots of the MLM head, R slots of a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from transformers import PretrainedConfig, PreTrainedModel

from trainer.config.train_config import TrainConfig
from trainer.data.loader import MicroBatch
from trainer.errors import BadConfig
from trainer.model.sparse_last_layer import (
    DocumentQueries,
    SequenceQueries,
    attend_documents,
)

AttentionKind = Literal["varlen", "fa3", "sdpa", "row"]

VARLEN_NAME = "varlen_documents"
"""Name under which transformers knows our attention function."""
_MOST_HEAD_DIMENSIONS = 256
"""Limit of FlashAttention's kernels, which also require a multiple of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Ways in which an architecture takes packed sequences."""

    first_position: int = 0
    """Position id of a document's first token: RoBERTa's begin after the padding id."""
    needs_embeddings: bool = False
    """True if the encoder must get embeddings, as its own embedding layer multiplies
    them by the padding mask."""
    no_varlen_reason: str | None = None
    """Reason why attention document by document cannot replace the encoder's own; None
    if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """Kind of attention, with the reason for it."""

    kind: AttentionKind
    reason: str
    packing: Packing = Packing()

    @property
    def uses_document_edges(self) -> bool:
        """True if a kernel gets the edges of documents; False if it gets a mask."""
        return self.kind in ("varlen", "fa3")


def dropout_key(model_config: PretrainedConfig) -> str | None:
    """Return the key of the attention dropout in a model's config, BERT's or ModernBERT's, or None."""
    keys = ("attention_probs_dropout_prob", "attention_dropout")
    return next((key for key in keys if hasattr(model_config, key)), None)


def choose_attention(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    packing: Packing | str,
) -> ChosenAttention:
    """Return the attention to use after ``verify_packing``.

    Raises:
        BadConfig: If the configured one is impossible.
    """
    if isinstance(packing, str):
        if config.layout == "packed" or config.attention != "auto":
            what = (
                f"{model_config.model_type!r} supports neither packed sequences nor a"
                f" choice of attention: {packing}"
            )
            settings = "--set train.layout=bucketed --set train.attention=auto"
            raise BadConfig(
                what,
                next_step=f"Use {settings}, or a bert, roberta or modernbert model.",
            )
        return ChosenAttention(
            kind="row", reason=f"padding mask of {model_config.model_type}: {packing}"
        )
    if config.attention == "sdpa":
        return ChosenAttention(
            kind="sdpa", reason="set by train.attention", packing=packing
        )
    against = _against_varlen(config, model_config, device, packing)
    if against is None:
        kind: AttentionKind = "fa3" if config.attention == "fa3" else "varlen"
        return ChosenAttention(
            kind=kind, reason="no cross-document attention", packing=packing
        )
    if config.attention == "auto":
        return ChosenAttention(kind="sdpa", reason=against[0], packing=packing)
    raise BadConfig(
        f"train.attention = {config.attention!r} cannot be used: {against[0]}",
        next_step=against[1],
    )


def _against_varlen(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    packing: Packing,
) -> tuple[str, str] | None:
    """Return the reason why varlen cannot be used and the next step, or None if it can."""
    if packing.no_varlen_reason is not None:
        return (
            f"with varlen {packing.no_varlen_reason}",
            "Use --set train.attention=sdpa.",
        )
    # Not the device's type: a model that is traced without a GPU is on no device.
    if config.device != "cuda":
        return "varlen requires a GPU", "Use --set train.attention=sdpa."
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return (
            f"varlen requires an Ampere or newer GPU, not {name}",
            "Use --set train.attention=sdpa.",
        )
    if config.precision != "bf16":
        return (
            "varlen requires bf16",
            "Use --set train.precision=bf16, or --set train.attention=sdpa.",
        )
    dropout = float(getattr(model_config, dropout_key(model_config) or "", 0.0))
    if dropout > 0:
        next_step = (
            "Change the recipe with --set train.attention_dropout=0, or use --set"
            " train.attention=sdpa."
        )
        return (
            (
                "varlen does not support attention dropout, and the model's is"
                f" {dropout:g}"
            ),
            next_step,
        )
    head_dimensions = getattr(model_config, "head_dim", None)
    head_dimensions = (
        head_dimensions or model_config.hidden_size // model_config.num_attention_heads
    )
    if head_dimensions > _MOST_HEAD_DIMENSIONS or head_dimensions % 8:
        return (
            f"varlen does not support a head dimension of {head_dimensions}",
            "Use --set train.attention=sdpa.",
        )
    if (
        config.attention == "fa3"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] != 9
    ):
        return (
            f"fa3 requires a Hopper GPU, not {torch.cuda.get_device_name(device)}",
            "Use --set train.attention=auto.",
        )
    return None


def pin_kernels(kind: AttentionKind) -> None:
    """Restrict attention on GPUs to kernels that the memory model knows.

    Raises:
        BadConfig: If FA3 does not load.
    """
    cuda = torch.backends.cuda
    # cuDNN's attention keeps tensors and workspaces that the memory model does not
    # cover, rounds a dropout of 0.1 to 1/16 or 2/16 in torch 2.11, and gives NaN
    # gradients at some masked widths (pytorch issue 196678).
    cuda.enable_cudnn_sdp(False)
    for enable in (
        cuda.enable_flash_sdp,
        cuda.enable_mem_efficient_sdp,
        cuda.enable_math_sdp,
    ):
        enable(True)  # explicit weights only for heads that neither kernel supports
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    if kind == "fa3":
        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            what = (
                "train.attention = 'fa3' requires FlashAttention 3, which cannot be"
                f" loaded: {error}"
            )
            next_step = (
                "Install flash_attn_interface (hopper/ in its source), or use --set"
                " train.attention=auto."
            )
            raise BadConfig(what, next_step=next_step) from error


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
    attend: Callable[..., torch.Tensor] = attend_documents,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return attention within documents of one long sequence, shape (1, T, H, E).

    Transformers' signature.
    """
    if dropout or attention_mask is not None:
        raise ValueError("varlen attention supports neither dropout nor masks")
    # Grouped queries share keys and values.
    if (heads_per_key := query_BHSE.shape[1] // key_BHSE.shape[1]) > 1:
        key_BHSE, value_BHSE = (
            tensor.repeat_interleave(heads_per_key, 1)
            for tensor in (key_BHSE, value_BHSE)
        )
    query_THE, key_THE, value_THE = (
        tensor.squeeze(0).transpose(0, 1)
        for tensor in (query_BHSE, key_BHSE, value_BHSE)
    )
    attended_THE = attend(
        query_THE,
        key_THE,
        value_THE,
        query_edges=cu_seq_lens_q,
        key_edges=cu_seq_lens_q,
        max_query_length=max_length_q,
        max_key_length=max_length_q,
        scale=scaling,
        # transformers counts the token itself
        window_tokens=None if sliding_window is None else sliding_window - 1,
    )
    return attended_THE.unsqueeze(0), None


def document_positions(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the document of each position, int32, from 1, and its index in it, int64.

    Both (B, S) and 0 on padding.
    """
    shape, device = batch.ids_BS.shape, batch.ids_BS.device
    starts_N = batch.starts_N.to(torch.int64)
    begins_T = torch.zeros(batch.ids_BS.numel(), dtype=torch.int32, device=device)
    begins_T.index_fill_(0, starts_N, 1)
    number_T = begins_T.cumsum(0, dtype=torch.int32)
    # Positions before the first document belong to a document 0 without tokens.
    none = torch.zeros(1, dtype=torch.int64, device=device)
    start_T = torch.cat([none, starts_N]).index_select(0, number_T)
    tokens_T = torch.cat([none, batch.tokens_N.to(torch.int64)]).index_select(
        0, number_T
    )
    place_T = torch.arange(len(number_T), device=device) - start_T
    real_T = place_T < tokens_T
    return torch.where(real_T, number_T, 0).reshape(shape), torch.where(
        real_T, place_T, 0
    ).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """Arguments of an encoder's forward, and the tensors behind them."""

    arguments: dict[str, Any]
    document_BS: torch.Tensor | None = None
    """Document of each position; only for sdpa."""
    edges: torch.Tensor | None = None
    """Edges of documents and of padding, int32, ascending; only if computed by
    document."""


def encoder_inputs(
    batch: MicroBatch,
    kind: AttentionKind,
    packing: Packing,
    model: PreTrainedModel,
    *,
    dtype: torch.dtype,
    window_tokens: int | None,
    segments: int = 0,
) -> EncoderInputs:
    """Return the arguments that give an encoder the bounds of documents, so that it builds no mask.

    ``window_tokens`` is the reach of sliding-window layers to either side; None without
    such layers. ``segments`` is the least number of segments for varlen; fa3 has no
    empty ones.
    """
    ids_BS = batch.wide_ids_BS()
    if kind == "row":
        return EncoderInputs(
            arguments={"input_ids": ids_BS, "attention_mask": batch.attention_BS()}
        )
    if kind in ("varlen", "fa3"):
        edges = document_edges(batch, segments if kind == "varlen" else 0)
        # Its backward pass hangs on empty segments: flash-attention #1254.
        if kind == "fa3":
            edges = edges[: len(batch.starts_N) + batch.padded_sequences + 1]
            torch._dynamo.maybe_mark_dynamic(edges, 0)
        place_T = torch.arange(ids_BS.numel(), dtype=torch.int32, device=edges.device)
        begin_T = edges.index_select(
            0, torch.searchsorted(edges, place_T, right=True, out_int32=True) - 1
        )
        # In each segment, padding included, which nothing else attends to.
        position_T = (place_T - begin_T + packing.first_position).to(torch.int64)
        arguments: dict[str, Any] = {
            "input_ids": ids_BS.reshape(1, -1),
            "position_ids": position_T.unsqueeze(0),
        }
        if packing.needs_embeddings:
            document_BS = document_positions(batch)[0].reshape(1, -1)
            arguments |= _embedded(model, document_BS, len(batch.starts_N), **arguments)
        arguments |= {"cu_seq_lens_q": edges, "max_length_q": ids_BS.shape[1]}
        return EncoderInputs(arguments=arguments, edges=edges)
    document_BS, position_BS = document_positions(batch)
    arguments = {
        "input_ids": ids_BS,
        "position_ids": position_BS + packing.first_position,
    }
    if packing.needs_embeddings:
        arguments |= _embedded(model, document_BS, len(batch.starts_N), **arguments)
    mask_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    mask: Any = _additive(mask_BSS, dtype)
    if window_tokens is not None:
        place_S = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device)
        near_SS = (place_S[:, None] - place_S[None, :]).abs() <= window_tokens
        mask = {
            "full_attention": mask,
            "sliding_attention": _additive(mask_BSS & near_SS, dtype),
        }
    return EncoderInputs(
        arguments=arguments | {"attention_mask": mask}, document_BS=document_BS
    )


def _embedded(
    model: PreTrainedModel,
    document_BS: torch.Tensor,
    documents: int,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
) -> dict[str, torch.Tensor | None]:
    """Return the encoder's arguments with embeddings instead of ids.

    ESM's token dropout zeroes the embeddings of mask tokens and scales the others by
    their share of the document, which it would take of the whole sequence: (1 - 0.15 x
    0.8) / (1 - share), as in ``EsmEmbeddings``.
    """
    encoder: Any = model.base_model
    embeds_BSD = encoder.get_input_embeddings()(input_ids)
    if getattr(model.config, "token_dropout", False):
        masked_BS, number_T = (
            input_ids == model.config.mask_token_id,
            document_BS.flatten(),
        )
        counts_N2 = embeds_BSD.new_zeros((documents + 1, 2), dtype=torch.float32)
        ones_BS = torch.ones_like(masked_BS)
        counts_N2.index_add_(
            0, number_T, torch.stack([masked_BS, ones_BS], -1).flatten(0, 1).float()
        )
        share_BS = (counts_N2[:, 0] / counts_N2[:, 1])[document_BS]
        scale_BS = torch.where(masked_BS, 0.0, (1 - 0.15 * 0.8) / (1 - share_BS))
        embeds_BSD = (embeds_BSD * scale_BS.unsqueeze(-1)).to(embeds_BSD.dtype)
    embedded = encoder.embeddings(inputs_embeds=embeds_BSD, position_ids=position_ids)
    return {"input_ids": None, "inputs_embeds": embedded}


def document_queries(
    inputs: EncoderInputs,
    batch: MicroBatch,
    position_K: torch.Tensor,
    kind: AttentionKind,
) -> DocumentQueries:
    """Return the queries of the sparse last layer by document.

    ``position_K`` is ascending.
    """
    assert inputs.edges is not None
    query_edges = torch.searchsorted(position_K, inputs.edges, out_int32=True)
    if kind == "fa3":
        torch._dynamo.maybe_mark_dynamic(query_edges, 0)
    slots, max_key_length = len(position_K), batch.ids_BS.shape[1]
    # Unused slots are spread evenly, so no document gets more of them than it has
    # positions.
    max_query_length = min(slots, (2 + slots // batch.ids_BS.numel()) * max_key_length)
    return DocumentQueries(
        position_K=position_K,
        query_edges=query_edges,
        key_edges=inputs.edges,
        max_query_length=max_query_length,
        max_key_length=max_key_length,
    )


def sequence_queries(
    inputs: EncoderInputs,
    batch: MicroBatch,
    position_K: torch.Tensor,
    *,
    sequence_slots: int,
    dtype: torch.dtype,
) -> SequenceQueries:
    """Return the queries of the sparse last layer for whole sequences under a mask.

    ``position_K`` are the positions to predict, ascending, then those of unused slots.
    ``sequence_slots`` is at least the most tokens to predict in any sequence.
    """
    document_BS = inputs.document_BS
    assert document_BS is not None
    rows, width = batch.ids_BS.shape
    number_K = torch.arange(len(position_K), device=position_K.device)
    counts_K = number_K < batch.predicted_tokens
    row_K = position_K // width
    first_of_row_K = torch.searchsorted(
        torch.where(counts_K, position_K, rows * width), row_K * width
    )
    slot_K = torch.where(
        counts_K,
        row_K * sequence_slots + number_K - first_of_row_K,
        rows * sequence_slots,
    )
    # An unused slot attends as its sequence's first position does, as a softmax over
    # nothing would be NaN.
    none = document_BS.new_zeros(1)
    asking = torch.cat(
        [document_BS[:, :1].expand(rows, sequence_slots).flatten(), none]
    )
    asking = asking.index_copy(0, slot_K, document_BS.flatten()[position_K])
    asking_BR = asking[:-1].unflatten(0, (rows, sequence_slots))
    mask_BRS = _additive(asking_BR[:, :, None] == document_BS[:, None, :], dtype)
    return SequenceQueries(position_K=position_K, slot_K=slot_K, mask_BRS=mask_BRS)


def _additive(allowed_BSS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask, shape (B, 1, S, S): 0 for pairs that may attend, else minus infinity.

    Made once for all layers: from a boolean mask each layer would make its own. Every
    position may attend to itself.
    """
    zero = torch.zeros((), dtype=dtype, device=allowed_BSS.device)
    return torch.where(allowed_BSS, zero, -torch.inf).unsqueeze(1)


def document_edges(batch: MicroBatch, segments: int) -> torch.Tensor:
    """Return the edges of documents and of padding, ascending from 0 to T, shape (max(segments, N + B) + 1,).

    Padding behind a sequence's documents attends to itself, as kernels leave positions
    outside all edges undefined, and assume that no segment is longer than a sequence.
    Segments are empty only at the end.
    """
    rows, width = batch.ids_BS.shape
    places, documents = rows * width, len(batch.starts_N)
    begin_B = torch.arange(rows, dtype=torch.int32, device=batch.ids_BS.device) * width
    row_N = (batch.starts_N // width).to(torch.int64)
    padding_B = begin_B.scatter_reduce(
        0, row_N, batch.starts_N + batch.tokens_N, "amax"
    )
    padding_B.masked_fill_(padding_B >= begin_B + width, places)
    ends = begin_B.new_full((max(segments - documents - rows, 0) + 1,), places)
    return torch.cat([batch.starts_N, padding_B, ends]).sort().values
