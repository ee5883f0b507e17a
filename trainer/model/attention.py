"""Choice of the attention that a training computes.

There is no cross-document attention in a packed sequence. The kinds of attention are:

- ``varlen``: document by document in one kernel, on Ampere and newer GPUs.
- ``fa4``: the same, in the kernels of FlashAttention 2 or 4 that are fastest for the
  mean length of documents, on Hopper GPUs.
- ``sdpa``: whole sequences under a mask that separates documents, on any device.
- ``row``: whole sequences under transformers' own padding mask, for architectures that
  cannot be packed: each sequence then holds one document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PretrainedConfig

from trainer.config.packages import has_flash_attention_4
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import TrainConfig

AttentionKind = Literal["varlen", "fa4", "sdpa", "row"]
"""Kind of attention; the module's docstring explains each."""

_HOPPER = 9
"""Major compute capability of the GPUs on which FlashAttention 4 was measured."""
_MAX_HEAD_DIMENSIONS = 256
"""Limit of FlashAttention's kernels, which also require a multiple of 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Way in which an architecture takes packed sequences."""

    first_position: int = 0
    """Position id of a document's first token: RoBERTa's begin after the padding id."""
    needs_embeddings: bool = False
    """True if the encoder must get embeddings, as its own embedding layer multiplies
    them by the padding mask."""
    no_varlen_reason: str | None = None
    """Reason why attention document by document cannot replace the encoder's own; None
    if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotBePacked:
    """Result for an architecture that does not take packed sequences."""

    reason: str
    """Reason why it does not, as a clause for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenAttention:
    """Kind of attention, with the reason for it."""

    kind: AttentionKind
    reason: str
    """Reason for this kind, as a clause for messages."""
    packing: Packing = Packing()
    """Way in which the architecture takes packed sequences; ignored for ``row``."""

    @property
    def uses_document_edges(self) -> bool:
        """True if a kernel gets the edges of documents; False if it gets a mask."""
        return self.kind in ("varlen", "fa4")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obstacle:
    """Reason why attention document by document cannot be used, and the next step."""

    reason: str
    next_step: str = "Use --set train.attention=sdpa."
    """Advice to a user who has configured it."""


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
    packing: Packing | CannotBePacked,
) -> ChosenAttention:
    """Return the attention to use: for ``auto``, varlen if nothing prevents it.

    Args:
        config: Configuration of the training.
        model_config: Config of the model.
        device: Device of the model.
        packing: Result of ``verify_packing``.

    Raises:
        BadConfig: If the configured attention cannot be used.
    """
    if isinstance(packing, CannotBePacked):
        return _choose_unpacked(config, model_config, packing.reason)
    if config.attention == "sdpa":
        return ChosenAttention(
            kind="sdpa", reason="set by train.attention", packing=packing
        )
    obstacles = _varlen_obstacles(config, model_config, device, packing)
    obstacle = next(obstacles, None)
    if obstacle is None:
        return ChosenAttention(
            kind="fa4" if config.attention == "fa4" else "varlen",
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


def _varlen_obstacles(
    config: TrainConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    packing: Packing,
) -> Iterator[_Obstacle]:
    """Yield the obstacles to attention document by document, the most basic first."""
    if packing.no_varlen_reason is not None:
        yield _Obstacle(reason=f"with varlen {packing.no_varlen_reason}")
    # Not the device's type: a model that is traced without a GPU is on no device.
    if config.device != "cuda":
        yield _Obstacle(reason="varlen requires a GPU")
    capability = None
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    if capability is not None and capability < (8, 0):
        name = torch.cuda.get_device_name(device)
        yield _Obstacle(reason=f"varlen requires an Ampere or newer GPU, not {name}")
    if config.precision != "bf16":
        yield _Obstacle(
            reason="varlen requires bf16",
            next_step=(
                "Use --set train.precision=bf16, or --set train.attention=sdpa."
            ),
        )
    yield from _obstacles_of_model(model_config)
    if config.attention == "fa4" and capability is not None:
        yield from _obstacles_of_fa4(device, capability)


def _obstacles_of_fa4(
    device: torch.device, capability: tuple[int, int]
) -> Iterator[_Obstacle]:
    """Yield the obstacles to FlashAttention 4 on a GPU."""
    if capability[0] != _HOPPER:
        name = torch.cuda.get_device_name(device)
        yield _Obstacle(
            reason=f"fa4 requires a Hopper GPU, not {name}",
            next_step="Use --set train.attention=auto.",
        )
    if not has_flash_attention_4():
        yield _Obstacle(
            reason="flash-attn-4 is not installed",
            next_step=(
                "Install it: pip install '.[fa4]', or use --set train.attention=auto."
            ),
        )


def _obstacles_of_model(model_config: PretrainedConfig) -> Iterator[_Obstacle]:
    """Yield settings of a model that the kernels do not support."""
    key = dropout_key(model_config)
    dropout = 0.0 if key is None else float(getattr(model_config, key))
    if dropout > 0:
        yield _Obstacle(
            reason=(
                "varlen does not support attention dropout, and the model's is"
                f" {dropout:g}"
            ),
            next_step=(
                "Change the recipe with --set train.attention_dropout=0, or use --set"
                " train.attention=sdpa."
            ),
        )
    dimensions = head_dimensions(model_config)
    if dimensions > _MAX_HEAD_DIMENSIONS or dimensions % 8:
        yield _Obstacle(
            reason=f"varlen does not support a head dimension of {dimensions}"
        )


def head_dimensions(model_config: PretrainedConfig) -> int:
    """Return the number of dimensions of an attention head."""
    dimensions: int | None = getattr(model_config, "head_dim", None)
    if dimensions:
        return dimensions
    return int(model_config.hidden_size // model_config.num_attention_heads)


def pin_kernels() -> None:
    """Restrict attention on GPUs to kernels that the memory model knows."""
    cuda = torch.backends.cuda
    # cuDNN's attention keeps tensors and workspaces that the memory model does not
    # cover, rounds a dropout of 0.1 to 1/16 or 2/16 in torch 2.11, and gives NaN
    # gradients at some masked widths (pytorch issue 196678).
    cuda.enable_cudnn_sdp(False)
    cuda.enable_flash_sdp(True)
    cuda.enable_mem_efficient_sdp(True)
    # For heads that neither of the two kernels supports, torch falls back to matmuls.
    cuda.enable_math_sdp(True)
