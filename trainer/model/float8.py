"""Matmuls of linear layers in float8, by torchao.

They cast working copies and inputs to float8 while they compute.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from trainer.formats.train_config import TrainConfig
from trainer.model.requirements import (
    Condition,
    in_bf16,
    require,
    with_working_copies,
    without_fsdp2,
)
from trainer.model.working_copies import Linear

_FLOAT8_MULTIPLE = 16
"""All dimensions of a float8 matmul must be multiples of this number."""
_FIRST_CAPABILITY = (8, 9)
"""CUDA capability of Ada, the first GPUs with float8 Tensor Cores."""


def check_float8(
    config: TrainConfig, device: torch.device, *, has_copies: bool
) -> None:
    """Check that linear layers can compute in float8.

    Args:
        config: Configuration of the training.
        device: Device of the model.
        has_copies: True if linear layers have working copies.

    Raises:
        BadConfig: If linear layers cannot, or torchao is not installed.
    """
    conditions = (
        Condition(
            is_fulfilled=_has_float8_tensor_cores(config, device),
            reason="requires float8 Tensor Cores: an Ada, Hopper or newer GPU",
        ),
        in_bf16(config),
        Condition(
            is_fulfilled=config.compiled,
            reason="requires compiled layers, which fuse its casts",
            setting="compile=true",
        ),
        without_fsdp2(config),
        with_working_copies(config, has_copies=has_copies),
    )
    require("float8", conditions, off="none", library="torchao", extra="fp8")


def _has_float8_tensor_cores(config: TrainConfig, device: torch.device) -> bool:
    if config.device != "cuda":
        return False
    # A model that is traced without a GPU is on no device of type cuda.
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def use_float8(
    layers: Iterable[nn.Module],
    recipe: Literal["tensorwise", "rowwise"],
    *,
    emulate: bool = False,
) -> None:
    """Let linear layers with copies compute in float8 by a recipe of torchao.

    Args:
        layers: Layers of the encoder.
        recipe: Name of the recipe.
        emulate: True to round to float8 but multiply in a wider type, on any device.
    """
    # torchao is an optional package.
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    aligned = _matmul_config(config, pads_inner_dimension=False)
    padded = _matmul_config(config, pads_inner_dimension=True)

    def matmul(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The inner dimension of the weight gradient's matmul is the number of tokens.
        tokens = input.numel() // input.shape[-1]
        mm_config = padded if tokens % _FLOAT8_MULTIPLE else aligned
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(
            input, weight.t(), mm_config, config
        )
        return result

    for layer in layers:
        for part in layer.modules():
            if isinstance(part, Linear) and _fits_float8(part):
                vars(part)["float8_matmul"] = matmul


def _matmul_config(config: Any, *, pads_inner_dimension: bool) -> Any:
    """Return torchao's config of a matmul.

    Only a layer that torchao has converted has one. Converting a layer also replaces
    code of Inductor from which Triton generates wrong stores of float8.
    """
    # torchao is an optional package.
    from torchao.float8 import convert_to_float8_training

    any_layer = nn.Linear(_FLOAT8_MULTIPLE, _FLOAT8_MULTIPLE, device="meta")
    converted: Any = convert_to_float8_training(
        any_layer, config=replace(config, pad_inner_dim=pads_inner_dimension)
    )
    return converted.linear_mm_config


def _fits_float8(linear: Linear) -> bool:
    """Return True if all dimensions of a layer's matmuls suit float8."""
    sizes = (linear.in_features, *linear.group_features)
    return all(size % _FLOAT8_MULTIPLE == 0 for size in sizes)
