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
from trainer.data.micro_batch import MicroBatch
from trainer.errors import BadConfig
from trainer.model.sparse_last_layer import (
    DocumentQueries,
    SequenceQueries,
    attend_documents,
)

AttentionKind = Literal["varlen", "fa3", "sdpa", "row"]

VARLEN_NAME = "varlen_documents"
"""Name under which transformers knows our attention function."""
_MAX_HEAD_DIMENSIONS = 256
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
    """How the architecture takes packed sequences."""

    @property
    def uses_document_edges(self) -> bool:
        """True if a kernel gets the edges of documents; False if it gets a mask."""
        return self.kind in ("varlen", "fa3")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obstacle:
    """Reason why attention document by document cannot be used, and the next step."""

    reason: str
    next_step: str = "Use --set train.attention=sdpa."


def dropout_key(model_config: PretrainedConfig) -> str | None:
    """Return the key of the attention dropout in a model's config.

    Returns:
        BERT's key or ModernBERT's, or None if the config has neither.
    """
    for key in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(model_config, key):
            return key
    return None


def choose_attention(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    packing: Packing | str,
) -> ChosenAttention:
    """Return the attention to use.

    Args:
        config: Configuration of the training.
        model_config: Config of the model.
        device: Device of the model.
        packing: Result of ``verify_packing``.

    Raises:
        BadConfig: If the configured one is impossible.
    """
    if isinstance(packing, str):
        return _choose_unpacked(config, model_config, packing)
    if config.attention == "sdpa":
        return ChosenAttention(
            kind="sdpa", reason="set by train.attention", packing=packing
        )
    obstacle = _varlen_obstacle(config, model_config, device, packing)
    if obstacle is None:
        return ChosenAttention(
            kind="fa3" if config.attention == "fa3" else "varlen",
            reason="no cross-document attention",
            packing=packing,
        )
    if config.attention == "auto":
        return ChosenAttention(kind="sdpa", reason=obstacle.reason, packing=packing)
    raise BadConfig(
        f"train.attention = {config.attention!r} cannot be used: {obstacle.reason}",
        next_step=obstacle.next_step,
    )


def _choose_unpacked(
    config: TrainConfig, model_config: PretrainedConfig, reason: str
) -> ChosenAttention:
    """Return the attention of an architecture that cannot be packed for this reason."""
    if config.layout == "packed" or config.attention != "auto":
        settings = "--set train.layout=bucketed --set train.attention=auto"
        raise BadConfig(
            f"{model_config.model_type!r} supports neither packed sequences nor a"
            f" choice of attention: {reason}",
            next_step=f"Use {settings}, or a bert, roberta or modernbert model.",
        )
    return ChosenAttention(
        kind="row", reason=f"padding mask of {model_config.model_type}: {reason}"
    )


def _varlen_obstacle(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    packing: Packing,
) -> _Obstacle | None:
    """Return what prevents attention document by document; None if nothing does."""
    if packing.no_varlen_reason is not None:
        return _Obstacle(reason=f"with varlen {packing.no_varlen_reason}")
    # Not the device's type: a model that is traced without a GPU is on no device.
    if config.device != "cuda":
        return _Obstacle(reason="varlen requires a GPU")
    capability = None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    if capability is not None and capability < (8, 0):
        name = torch.cuda.get_device_name(device)
        return _Obstacle(reason=f"varlen requires an Ampere or newer GPU, not {name}")
    if config.precision != "bf16":
        return _Obstacle(
            reason="varlen requires bf16",
            next_step=(
                "Use --set train.precision=bf16, or --set train.attention=sdpa."
            ),
        )
    dropout = float(getattr(model_config, dropout_key(model_config) or "", 0.0))
    if dropout > 0:
        return _Obstacle(
            reason=(
                "varlen does not support attention dropout, and the model's is"
                f" {dropout:g}"
            ),
            next_step=(
                "Change the recipe with --set train.attention_dropout=0, or use --set"
                " train.attention=sdpa."
            ),
        )
    head_dimensions = _head_dimensions(model_config)
    if head_dimensions > _MAX_HEAD_DIMENSIONS or head_dimensions % 8:
        return _Obstacle(
            reason=f"varlen does not support a head dimension of {head_dimensions}"
        )
    if config.attention == "fa3" and capability is not None and capability[0] != 9:
        name = torch.cuda.get_device_name(device)
        return _Obstacle(
            reason=f"fa3 requires a Hopper GPU, not {name}",
            next_step="Use --set train.attention=auto.",
        )
    return None


def _head_dimensions(model_config: PretrainedConfig) -> int:
    head_dimensions: int | None = getattr(model_config, "head_dim", None)
    if head_dimensions:
        return head_dimensions
    return int(model_config.hidden_size // model_config.num_attention_heads)


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
    cuda.enable_flash_sdp(True)
    cuda.enable_mem_efficient_sdp(True)
    # Explicit weights only for heads that neither kernel supports.
    cuda.enable_math_sdp(True)
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    if kind == "fa3":
        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            raise BadConfig(
                "train.attention = 'fa3' requires FlashAttention 3, which cannot be"
                f" loaded: {error}",
                next_step=(
                    "Install flash_attn_interface (hopper/ in its source), or use --set"
                    " train.attention=auto."
                ),
            ) from error


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

    The signature is that of attention functions in transformers.

    Raises:
        ValueError: If there is dropout or a mask.
    """
    if dropout or attention_mask is not None:
        raise ValueError("varlen attention supports neither dropout nor masks")
    # Grouped queries share keys and values.
    heads_per_key = query_BHSE.shape[1] // key_BHSE.shape[1]
    if heads_per_key > 1:
        key_BHSE = key_BHSE.repeat_interleave(heads_per_key, 1)
        value_BHSE = value_BHSE.repeat_interleave(heads_per_key, 1)
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
    """Return the arguments that give an encoder the bounds of documents.

    The encoder builds no mask then.

    Args:
        batch: The micro-batch.
        kind: Kind of attention.
        packing: How the architecture takes packed sequences.
        model: The model, for its embeddings.
        dtype: Type of masks.
        window_tokens: Reach of sliding-window layers to either side; None without such
            layers.
        segments: Least number of segments for varlen; fa3 has no empty ones.
    """
    if kind == "row":
        return EncoderInputs(
            arguments={
                "input_ids": batch.wide_ids_BS(),
                "attention_mask": batch.attention_BS(),
            }
        )
    if kind == "sdpa":
        return _masked_inputs(
            batch, packing, model, dtype=dtype, window_tokens=window_tokens
        )
    if kind == "varlen":
        edges = document_edges(batch, segments)
    else:
        # The backward pass of FlashAttention 3 hangs on empty segments:
        # flash-attention #1254.
        edges = document_edges(batch, 0)
        edges = edges[: len(batch.starts_N) + batch.padded_sequences + 1]
        torch._dynamo.maybe_mark_dynamic(edges, 0)
    return _segmented_inputs(batch, packing, model, edges)


def _segmented_inputs(
    batch: MicroBatch, packing: Packing, model: PreTrainedModel, edges: torch.Tensor
) -> EncoderInputs:
    """Return one long sequence with the edges of its segments."""
    ids_BS = batch.wide_ids_BS()
    index_T = torch.arange(ids_BS.numel(), dtype=torch.int32, device=edges.device)
    segment_T = torch.searchsorted(edges, index_T, right=True, out_int32=True) - 1
    begin_T = edges.index_select(0, segment_T)
    # In each segment, padding included, which nothing else attends to.
    position_T = (index_T - begin_T + packing.first_position).to(torch.int64)
    arguments: dict[str, Any] = {
        "input_ids": ids_BS.reshape(1, -1),
        "position_ids": position_T.unsqueeze(0),
    }
    if packing.needs_embeddings:
        document_BS, _ = document_positions(batch)
        arguments |= _embedded(
            model, document_BS.reshape(1, -1), len(batch.starts_N), **arguments
        )
    arguments |= {"cu_seq_lens_q": edges, "max_length_q": ids_BS.shape[1]}
    return EncoderInputs(arguments=arguments, edges=edges)


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
    arguments: dict[str, Any] = {
        "input_ids": ids_BS,
        "position_ids": index_BS + packing.first_position,
    }
    if packing.needs_embeddings:
        arguments |= _embedded(model, document_BS, len(batch.starts_N), **arguments)
    is_allowed_BSS = document_BS[:, :, None] == document_BS[:, None, :]
    mask: Any = _additive_mask(is_allowed_BSS, dtype)
    if window_tokens is not None:
        position_S = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device)
        distance_SS = (position_S[:, None] - position_S[None, :]).abs()
        is_near_SS = distance_SS <= window_tokens
        mask = {
            "full_attention": mask,
            "sliding_attention": _additive_mask(is_allowed_BSS & is_near_SS, dtype),
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
    """Return the encoder's arguments with embeddings instead of ids."""
    encoder: Any = model.base_model
    embeds_BSD = encoder.get_input_embeddings()(input_ids)
    if getattr(model.config, "token_dropout", False):
        is_mask_BS = input_ids == model.config.mask_token_id
        scale_BS = _token_dropout_scale(is_mask_BS, document_BS, documents)
        embeds_BSD = (embeds_BSD * scale_BS.unsqueeze(-1)).to(embeds_BSD.dtype)
    embedded = encoder.embeddings(inputs_embeds=embeds_BSD, position_ids=position_ids)
    return {"input_ids": None, "inputs_embeds": embedded}


def _token_dropout_scale(
    is_mask_BS: torch.Tensor, document_BS: torch.Tensor, documents: int
) -> torch.Tensor:
    """Return ESM's token dropout as a factor for each embedding, fp32, shape (B, S).

    ESM zeroes the embeddings of mask tokens and scales the others by their share of the
    document, which it would take of the whole sequence: (1 - 0.15 x 0.8) / (1 - share),
    as in ``EsmEmbeddings``.
    """
    counts_N2 = is_mask_BS.new_zeros((documents + 1, 2), dtype=torch.float32)
    # Mask tokens and all tokens of each document.
    ones_BS = torch.ones_like(is_mask_BS)
    counts_N2.index_add_(
        0,
        document_BS.flatten(),
        torch.stack([is_mask_BS, ones_BS], -1).flatten(0, 1).float(),
    )
    share_BS = (counts_N2[:, 0] / counts_N2[:, 1])[document_BS]
    return torch.where(is_mask_BS, 0.0, (1 - 0.15 * 0.8) / (1 - share_BS))


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
    slots = len(position_K)
    max_key_length = batch.ids_BS.shape[1]
    # Unused slots are spread evenly, so no document gets more of them than it has
    # positions.
    queries_per_position = 2 + slots // batch.ids_BS.numel()
    return DocumentQueries(
        position_K=position_K,
        query_edges=query_edges,
        key_edges=inputs.edges,
        max_query_length=min(slots, queries_per_position * max_key_length),
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

    Args:
        inputs: Inputs of the encoder.
        batch: The micro-batch.
        position_K: Positions to predict, ascending, then those of unused slots.
        sequence_slots: Slots of a sequence, at least the most tokens to predict in any.
        dtype: Type of the mask.
    """
    document_BS = inputs.document_BS
    assert document_BS is not None
    sequences, width = batch.ids_BS.shape
    number_K = torch.arange(len(position_K), device=position_K.device)
    is_used_K = number_K < batch.predicted_tokens
    sequence_K = position_K // width
    # Number of the first position to predict in the same sequence; unused slots are
    # behind all sequences here, to keep the order ascending.
    first_number_K = torch.searchsorted(
        torch.where(is_used_K, position_K, sequences * width), sequence_K * width
    )
    slot_K = torch.where(
        is_used_K,
        sequence_K * sequence_slots + number_K - first_number_K,
        sequences * sequence_slots,
    )
    # An unused slot attends as its sequence's first position does, as a softmax over
    # nothing would be NaN.
    first_documents = document_BS[:, :1].expand(sequences, sequence_slots).flatten()
    documents = torch.cat([first_documents, document_BS.new_zeros(1)])
    documents = documents.index_copy(0, slot_K, document_BS.flatten()[position_K])
    document_BR = documents[:-1].unflatten(0, (sequences, sequence_slots))
    mask_BRS = _additive_mask(document_BR[:, :, None] == document_BS[:, None, :], dtype)
    return SequenceQueries(position_K=position_K, slot_K=slot_K, mask_BRS=mask_BRS)


def _additive_mask(is_allowed_BSS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask, shape (B, 1, S, S): 0 for allowed pairs, else -inf.

    It is made once for all layers: from a boolean mask each layer would make its own.
    Every position may attend to itself.
    """
    zero = torch.zeros((), dtype=dtype, device=is_allowed_BSS.device)
    return torch.where(is_allowed_BSS, zero, -torch.inf).unsqueeze(1)


def document_edges(batch: MicroBatch, segments: int) -> torch.Tensor:
    """Return the edges of documents and of padding, ascending from 0 to T.

    Padding behind a sequence's documents attends to itself, as kernels leave positions
    outside all edges undefined, and assume that no segment is longer than a sequence.
    Segments are empty only at the end.

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
