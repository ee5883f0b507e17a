"""Layers of BERT whose MLP computes GELU within its matmuls, by Triton kernels.

Only how transformers' modules compute is changed: their parameters, names and places in
the model stay.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from trainer.config.compilers import require_triton
from trainer.formats.families import FAMILIES
from trainer.formats.train_config import TrainConfig
from trainer.model.fused_norms import subclass
from trainer.model.requirements import (
    Condition,
    in_bf16,
    on_gpu,
    require,
    with_working_copies,
    without_fsdp2,
)
from trainer.model.working_copies import compute_weights


def check_gelu_epilogues(
    config: TrainConfig,
    model_config: PretrainedConfig,
    *,
    device: torch.device,
    has_copies: bool,
) -> None:
    """Check that the kernels can compute the MLPs of this model.

    Args:
        config: Configuration of the training.
        model_config: Config of the model.
        device: Device of the model, which need not have Triton if it is only traced.
        has_copies: True if linear layers have working copies.

    Raises:
        BadConfig: If the kernels cannot compute the MLPs, or Triton is missing.
    """
    model_type = model_config.model_type
    conditions = (
        on_gpu(config),
        in_bf16(config),
        Condition(
            is_fulfilled=FAMILIES.get(model_type) == "bert",
            reason=(
                f"cannot be used with {model_type!r}, whose MLP is not a linear layer,"
                " GELU and another linear layer as BERT's"
            ),
        ),
        Condition(
            is_fulfilled=getattr(model_config, "hidden_act", None) == "gelu",
            reason="requires hidden_act = 'gelu' in the model's config",
        ),
        Condition(
            is_fulfilled=config.float8 == "none",
            reason="cannot be used with float8",
            setting="float8=none",
        ),
        without_fsdp2(config),
        with_working_copies(config, has_copies=has_copies),
    )
    require("gelu_epilogues", conditions, off="false")
    if device.type == "cuda":
        require_triton("gelu_epilogues")


def use_gelu_epilogues(layers: Sequence[nn.Module]) -> None:
    """Let Triton kernels compute GELU in the matmuls of BERT's layers.

    The second linear layer of each MLP computes the whole MLP.

    Args:
        layers: Layers of the encoder, with working copies.
    """
    passing: Any = _PassedInput
    for layer in layers:
        intermediate: Any = layer.get_submodule("intermediate")
        second: Any = layer.get_submodule("output.dense")
        # The class is changed in place: the module keeps its parameters, hooks and name
        # in the model.
        intermediate.__class__ = subclass(passing, intermediate.__class__)
        intermediate.first_weights = {}
        second.first_weights = intermediate.first_weights


class _PassedInput(nn.Module):
    """First linear layer and GELU of an MLP that its second linear layer computes."""

    dense: nn.Linear
    first_weights: dict[str, torch.Tensor | None]
    """Table in which the second layer finds weight and bias of the first."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the input of the MLP."""
        weight, bias = compute_weights(self.dense)
        self.first_weights["weight"] = weight
        self.first_weights["bias"] = bias
        return hidden_states
