"""The one place that says what a token may attend to: its own document, and nothing else in its row.

Two ways lead there. ``varlen`` computes every document on its own, in one kernel, on GPUs from Ampere on. ``sdpa``
computes whole rows under a mask, anywhere. A third, ``row``, is for encoders that this project knows nothing of:
transformers' own mask of padding, which packed rows cannot use.

Shapes: B rows of a micro-batch, S places of a row, T = B * S, N documents, H heads, D of a head.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig

from trainer.config import TrainConfig
from trainer.errors import BadConfig
from trainer.feed import MicroBatch

AttentionKind = Literal["varlen", "sdpa", "row"]

VARLEN_NAME = "varlen_documents"
"""What transformers calls our attention function."""
_AMPERE = (8, 0)
_MOST_HEAD_DIMENSIONS = 256
"""The limit of FlashAttention 2's kernels; they also want a multiple of 8."""
_DROPOUT_KEYS = ("attention_probs_dropout_prob", "attention_dropout")
"""How transformers' configs call the dropout of attention weights: BERT and its descendants, ModernBERT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """How attention is computed, and why so."""

    kind: AttentionKind
    reason: str


def dropout_key(model_config: PretrainedConfig) -> str | None:
    """The name of the attention dropout in a model's config, or None where it has none."""
    return next((key for key in _DROPOUT_KEYS if hasattr(model_config, key)), None)


def choose_attention(
    config: TrainConfig, model_config: PretrainedConfig, device: torch.device, *, known: bool
) -> ChosenAttention:
    """Which way to take.

    Args:
        config: Says what was asked for.
        model_config: Of the model.
        device: Where it runs.
        known: Whether the encoder passes on where its documents lie.

    Raises:
        BadConfig: If rows are packed and the encoder is unknown, or varlen was asked for and cannot be had.
    """
    if not known:
        if config.layout == "packed" or config.attention != "auto":
            raise BadConfig(
                f"a {model_config.model_type!r} encoder would attend across the samples of a packed row",
                next_step="Use --set train.layout=bucketed, with train.attention=auto; or a bert, roberta or "
                "modernbert model.",
            )
        return ChosenAttention(kind="row", reason=f"{model_config.model_type} is only known by its padding mask")
    if config.attention == "sdpa":
        return ChosenAttention(kind="sdpa", reason="asked for")
    against = _against_varlen(config, model_config, device)
    if against is None:
        return ChosenAttention(kind="varlen", reason="documents are computed one by one")
    if config.attention == "varlen":
        raise BadConfig(f"train.attention is varlen, and {against[0]}", next_step=against[1])
    return ChosenAttention(kind="sdpa", reason=against[0])


def _against_varlen(
    config: TrainConfig, model_config: PretrainedConfig, device: torch.device
) -> tuple[str, str] | None:
    """Why varlen cannot be had, and what would help; None where it can."""
    if device.type not in {"cuda", "meta"}:
        return "a CPU has no varlen kernel", "Use --set train.attention=sdpa."
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _AMPERE:
        name = torch.cuda.get_device_name(device)
        return f"{name} is older than Ampere", "Use --set train.attention=sdpa."
    if config.precision != "bf16":
        return "varlen kernels compute in bf16", "Use --set train.precision=bf16, or train.attention=sdpa."
    dropout = float(getattr(model_config, dropout_key(model_config) or "", 0.0))
    if dropout > 0:
        return (
            f"varlen kernels have no dropout of attention weights, and the model's is {dropout:g}",
            "Change the recipe in words, --set train.attention_dropout=0, or use train.attention=sdpa.",
        )
    head_dimensions = model_config.hidden_size // model_config.num_attention_heads
    if head_dimensions > _MOST_HEAD_DIMENSIONS or head_dimensions % 8:
        return f"varlen kernels do not take heads of {head_dimensions}", "Use --set train.attention=sdpa."
    return None


def register_varlen() -> None:
    """Make our attention function known to transformers; again does no harm."""
    AttentionInterface.register(VARLEN_NAME, attend_within_documents)


def attend_within_documents(
    module: nn.Module,
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,  # noqa: ANN401 - what else transformers hands to attention functions
) -> tuple[torch.Tensor, None]:
    """Attention of one long row, every document on its own; transformers' signature.

    Returns:
        Shape (1, T, H, D), and no weights.

    Raises:
        ValueError: If it is asked for what the kernel does not do.
    """
    if dropout or attention_mask is not None:
        raise ValueError("varlen attention has neither dropout nor masks")
    # transformers says how many places a window reaches to one side, plus one.
    reach = -1 if sliding_window is None else sliding_window - 1
    query_THD, key_THD, value_THD = (tensor.squeeze(0).transpose(0, 1) for tensor in (query_BHSD, key_BHSD, value_BHSD))
    attended_THD = varlen_attn(
        query_THD,
        key_THD,
        value_THD,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(reach, reach),
    )
    assert isinstance(attended_THD, torch.Tensor)
    return attended_THD.unsqueeze(0), None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPlaces:
    """Where the documents of a micro-batch lie, told for every place; made on the device, which is not waited for."""

    document_BS: torch.Tensor
    """int32: documents are numbered from 1, padding is 0."""
    position_BS: torch.Tensor
    """int64: the place within the document; 0 on padding."""

    @classmethod
    def of(cls, batch: MicroBatch) -> "DocumentPlaces":
        """Tell it from where documents start and how long they are."""
        shape = batch.ids_BS.shape
        device = batch.ids_BS.device
        starts_N = batch.starts_N.to(torch.int64)
        begins_T = torch.zeros(batch.ids_BS.numel(), dtype=torch.int32, device=device)
        begins_T.index_fill_(0, starts_N, 1)
        number_T = begins_T.cumsum(0, dtype=torch.int32)
        # Places before the first document belong to a document 0 without tokens.
        none = torch.zeros(1, dtype=torch.int64, device=device)
        start_T = torch.cat([none, starts_N]).index_select(0, number_T)
        tokens_T = torch.cat([none, batch.tokens_N.to(torch.int64)]).index_select(0, number_T)
        place_T = torch.arange(len(number_T), device=device) - start_T
        real_T = place_T < tokens_T
        return cls(
            document_BS=torch.where(real_T, number_T, 0).reshape(shape),
            position_BS=torch.where(real_T, place_T, 0).reshape(shape),
        )


def encoder_inputs(
    batch: MicroBatch,
    kind: AttentionKind,
    *,
    dtype: torch.dtype,
    first_position: int,
    window_tokens: int | None,
) -> dict[str, Any]:
    """What an encoder's forward takes, beside nothing that would make it build a mask of its own.

    Args:
        batch: On the device.
        kind: How attention is computed.
        dtype: Of queries and keys.
        first_position: The number of a document's first position: RoBERTa begins after the padding id.
        window_tokens: How far layers with a sliding window reach to either side; None without such layers.
    """
    if kind == "row":
        return {"input_ids": batch.wide_ids_BS(), "attention_mask": batch.attention_BS()}
    places = DocumentPlaces.of(batch)
    positions_BS = places.position_BS + first_position
    if kind == "varlen":
        return {
            "input_ids": batch.wide_ids_BS().reshape(1, -1),
            "position_ids": positions_BS.reshape(1, -1),
            "cu_seq_lens_q": _document_edges(batch),
            "max_length_q": batch.ids_BS.shape[1],
        }
    mask_BSS = places.document_BS[:, :, None] == places.document_BS[:, None, :]
    mask: Any = _additive(mask_BSS, dtype)
    if window_tokens is not None:
        place_S = torch.arange(batch.ids_BS.shape[1], device=batch.ids_BS.device)
        near_SS = (place_S[:, None] - place_S[None, :]).abs() <= window_tokens
        mask = {"full_attention": mask, "sliding_attention": _additive(mask_BSS & near_SS, dtype)}
    return {"input_ids": batch.wide_ids_BS(), "position_ids": positions_BS, "attention_mask": mask}


def _additive(allowed_BSS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Shape (B, 1, S, S): 0 where a place may be attended to, else minus infinity; every place may attend to itself.

    Made once for all layers; from a mask of truth values each layer would make this anew.
    """
    zero = torch.zeros((), dtype=dtype, device=allowed_BSS.device)
    return torch.where(allowed_BSS, zero, -torch.inf).unsqueeze(1)


def _document_edges(batch: MicroBatch) -> torch.Tensor:
    """Shape (2 N + 2,), int32, ascending from 0 to T: the edges of documents and of what lies between them.

    What lies between them, mostly nothing, is padding that attends to itself.
    """
    edges_N2 = torch.stack([batch.starts_N, batch.starts_N + batch.tokens_N], dim=1)
    ends = torch.tensor([0, batch.ids_BS.numel()], dtype=torch.int32)
    first, last = ends.to(batch.ids_BS.device, non_blocking=True).split(1)
    return torch.cat([first, edges_N2.flatten().to(torch.int32), last])
