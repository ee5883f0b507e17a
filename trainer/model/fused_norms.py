"""Layers of BERT whose dropout, residual sums and layer norms are Triton kernels.

Only how transformers' modules compute is changed: their parameters, names and places in
the model stay.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer.config.compilers import require_triton
from trainer.formats.families import LayerLayout
from trainer.formats.train_config import TrainConfig
from trainer.model.kernels.residual_norm import (
    MAX_COLUMNS,
    draw_seeds,
    residual_norm,
)
from trainer.model.requirements import (
    Condition,
    in_bf16,
    on_gpu,
    require,
    without_fsdp2,
)
from trainer.model.working_copies import compute_weights, project


def check_fused_norms(
    config: TrainConfig,
    layer_layout: LayerLayout | None,
    *,
    hidden_size: int,
    device: torch.device,
) -> None:
    """Check that the kernels can compute the layers of this model.

    Args:
        config: Configuration of the training.
        layer_layout: Layout of the layers.
        hidden_size: Width of the residual stream.
        device: Device of the model, which need not have Triton if it is only traced.

    Raises:
        BadConfig: If the kernels cannot compute the layers, or Triton is missing.
    """
    conditions = (
        on_gpu(config),
        in_bf16(config),
        Condition(
            is_fulfilled=layer_layout == "bert",
            reason=(
                f"cannot be used with {config.model.config['model_type']!r}, whose"
                " layers do not add and normalise as BERT's do"
            ),
        ),
        without_fsdp2(config),
        Condition(
            is_fulfilled=hidden_size <= MAX_COLUMNS,
            reason=f"requires a hidden size of at most {MAX_COLUMNS}",
        ),
    )
    require("fused_norms", conditions, off="false")
    if device.type == "cuda":
        require_triton("fused_norms")


class DropoutSeeds:
    """Seeds of dropout of all layers, which are drawn together.

    Args:
        outputs: Modules with dropout that kernels compute.
    """

    def __init__(self, outputs: Sequence["_FusedOutput"]) -> None:
        self._outputs = outputs

    def draw(self, device: torch.device) -> None:
        """Draw new seeds; call this before each training forward.

        Not a hook of a layer, which would run again when activations are recomputed.
        """
        seeds = draw_seeds(len(self._outputs), device)
        for output, seed in zip(self._outputs, seeds, strict=True):
            output.dropout_seed = seed


def fuse_norms(layers: Sequence[nn.Module]) -> DropoutSeeds:
    """Let Triton kernels compute the residual sums and layer norms of BERT's layers.

    Args:
        layers: Layers of the encoder.

    Returns:
        The seeds of their dropout.
    """
    outputs = []
    computed_by: dict[str, Any] = {
        "attention.output": _FusedOutput,
        "output": _FusedOutput,
        "intermediate": _FusedInput,
    }
    for layer in layers:
        # Layers that compute their MLP in chunks have another input of each chunk.
        in_chunks = getattr(layer, "chunk_size_feed_forward", 0) > 0
        matmul_inputs: dict[str, torch.Tensor] | None = None if in_chunks else {}
        for name, fused in computed_by.items():
            part: Any = layer.get_submodule(name)
            if name == "intermediate" and in_chunks:
                continue
            # The class is changed in place: the module keeps its parameters, hooks and
            # name in the model.
            part.__class__ = subclass(fused, part.__class__)
            part.matmul_inputs = None if name == "output" else matmul_inputs
            if fused is _FusedOutput:
                part.dropout_seed = None
                if part.dropout.p > 0:
                    outputs.append(part)
    return DropoutSeeds(outputs)


@functools.cache
def subclass(fused: Any, original: Any) -> Any:
    """Return a subclass of transformers' class that computes as ``fused`` does.

    It has the original's name, as memory breakdowns name activations by the class of
    their module. Layers share it, and so compiled graphs.
    """
    return type(original.__name__, (fused, original), {})


class _FusedOutput(nn.Module):
    """Linear layer, dropout, residual sum and layer norm of BERT's layers."""

    dense: nn.Linear
    dropout: nn.Dropout
    LayerNorm: nn.LayerNorm
    matmul_inputs: dict[str, torch.Tensor] | None
    """Table with the input of the next module for matmuls; None if it needs none."""
    dropout_seed: torch.Tensor | None
    """Seed of dropout in this micro-batch; None to draw one."""

    def forward(
        self, hidden_states: torch.Tensor, input_tensor: torch.Tensor
    ) -> torch.Tensor:
        """Return the norm of the residual stream with this layer's result.

        Args:
            hidden_states: Input of the linear layer, shape (…, I).
            input_tensor: The residual stream, shape (…, D).
        """
        _, bias = compute_weights(self.dense)
        assert bias is not None  # as in all families with BERT's layers
        norm = self.LayerNorm
        result, matmul_input = residual_norm(
            project(self.dense, hidden_states, adds_bias=False),
            bias,
            input_tensor,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            dropout=self.dropout.p if self.training else 0.0,
            seed=self.dropout_seed,
            feeds_matmul=self.matmul_inputs is not None,
        )
        if self.matmul_inputs is not None:
            assert matmul_input is not None
            self.matmul_inputs["norm"] = matmul_input
        return result


class _FusedInput(nn.Module):
    """Module after a ``_FusedOutput``, which computes with the result in bf16."""

    matmul_inputs: dict[str, torch.Tensor]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the result for the residual stream."""
        matmul_input = self.matmul_inputs.pop("norm")
        result: torch.Tensor = super().forward(matmul_input)
        return result
