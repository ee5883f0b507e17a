"""Activation checkpointing: which activations to recompute in the backward pass."""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from trainer.formats.errors import BadConfig
from trainer.formats.train_config import TrainConfig
from trainer.model.flash_attention import ATTEND


def checkpoint_activations(model: PreTrainedModel, config: TrainConfig) -> None:
    """Set up the activation checkpointing of the configuration in a model.

    Raises:
        BadConfig: If transformers has no activation checkpointing for the architecture.
    """
    mode = config.activation_checkpointing
    if mode == "none":
        return
    if mode == "selective" and config.compiled:
        # Within its graphs, the compiler itself keeps the results of matmuls and
        # recomputes cheap operations.
        return
    if not model.supports_gradient_checkpointing:
        raise BadConfig(
            "transformers has no activation checkpointing for"
            f" {model.config.model_type!r}",
            next_step="Use --set train.activation_checkpointing=none",
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_costly_operations
        )
    # Decoders keep keys and values in this cache; transformers warns if it is on.
    model.config.use_cache = False
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # the name in earlier versions of transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keep_costly_operations(
    _: object, operation: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    """Return whether selective checkpointing saves or recomputes an operation."""
    if operation in _costly_operations():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _costly_operations() -> frozenset[Any]:
    """Return the operations that take too long to recompute.

    They are the matmuls and attention kernels among those that this version of torch
    has.
    """
    aten = torch.ops.aten
    operations = [
        getattr(aten, name, None)
        for name in (
            "mm",
            "addmm",
            "bmm",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
    ]
    # Our own matmul, which models with ``gelu_epilogues`` have registered.
    operations.append(getattr(torch.ops.trainer, "linear_gelu", None))
    # The operation in ``torch.nn.attention.varlen``, which has no public name.
    operations.append(getattr(torch.ops.torch_attn, "_varlen_attn", None))
    overloads = [operation.default for operation in operations if operation is not None]
    return frozenset([*overloads, ATTEND])
