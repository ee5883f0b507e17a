"""The head's last layer and its cross-entropy in one function of Liger Kernel.

The function never holds all logits, the largest tensor of a step.

Shapes: K slots of the head, D hidden, V ids.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.data.masking import IGNORED_LABEL
from trainer.formats.train_config import TrainConfig
from trainer.model.encoder import model_head
from trainer.model.requirements import (
    Condition,
    on_gpu,
    require,
    without_fsdp2,
)


def check_fused_loss(config: TrainConfig, model: PreTrainedModel) -> None:
    """Check that the head's last layer and the loss can be computed in one function.

    Raises:
        BadConfig: If this model's cannot, or Liger Kernel is not installed.
    """
    conditions = (
        on_gpu(config),
        Condition(
            is_fulfilled=config.mlm_head == "sparse",
            reason="requires a sparse MLM head",
            setting="mlm_head=sparse",
        ),
        without_fsdp2(config),
        Condition(
            is_fulfilled=_ends_in_linear_layer(model),
            reason=(
                f"cannot be used with {model.config.model_type!r}, whose head does"
                " not end in a linear layer"
            ),
        ),
    )
    require(
        "fused_cross_entropy",
        conditions,
        off="false",
        library="liger_kernel",
        extra="liger",
    )


def _ends_in_linear_layer(model: PreTrainedModel) -> bool:
    """Return True if a linear layer makes the logits, and nothing is added to them."""
    decoder = model.get_output_embeddings()
    if not isinstance(decoder, nn.Linear):
        return False
    for part in model_head(model):
        for parameter in part.parameters():
            is_bias = parameter.shape == (model.config.vocab_size,)
            if is_bias and parameter is not decoder.bias:
                return False
    return True


def liger_cross_entropy(
    hidden_KD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_K: torch.Tensor,
    bias_V: torch.Tensor | None,
) -> torch.Tensor:
    """Return the summed cross-entropy of the logits of hidden states.

    Args:
        hidden_KD: Input of the head's last layer, which makes the logits.
        weight_VD: Weight of that layer.
        labels_K: Labels; slots with ``IGNORED_LABEL`` add nothing.
        bias_V: Bias of that layer, if any.

    Returns:
        The loss, fp32, shape ().
    """
    # Liger Kernel is an optional package.
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: torch.Tensor = liger_fused_linear_cross_entropy(
        hidden_KD,
        weight_VD,
        labels_K,
        bias_V,
        ignore_index=IGNORED_LABEL,
        reduction="sum",
        accum_dtype=torch.float32,
    )
    return loss
