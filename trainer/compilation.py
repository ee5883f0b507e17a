"""Compilation of the encoder's layers by ``torch.compile``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.config.compilers import missing_for_compile
from trainer.formats.errors import BadConfig
from trainer.formats.train_config import TrainConfig
from trainer.model.layer_norms import COMPILER_SAVES_COMPACT
from trainer.runtime.ranks import Ranks


def check_compile(config: TrainConfig, ranks: Ranks) -> None:
    """Check that layers can be compiled, if they are to be.

    Raises:
        BadConfig: If a setting or this machine does not allow it.
    """
    if not config.compiled:
        return
    if ranks.device.type == "cuda":
        missing = missing_for_compile("cuda")
        if missing is not None:
            raise BadConfig(
                f"layers cannot be compiled: {missing}",
                next_step="Use --set train.compile=false",
            )


def compile_layers(layers: Sequence[nn.Module], config: TrainConfig) -> None:
    """Compile each layer on its own; identical layers share one graph."""
    _configure_compiler()
    # Full checkpointing recomputes whole layers, so that their dropout keeps no mask.
    if COMPILER_SAVES_COMPACT and config.activation_checkpointing != "full":
        for layer in layers:
            _redraw_dropout(layer)
    options = _compiler_options(config)
    for layer in layers:
        layer.compile(fullgraph=True, options=options)


def _configure_compiler() -> None:
    """Set options of Dynamo, which only its module of settings offers."""
    # For DDP, Dynamo would split every layer at bucket boundaries, to overlap
    # synchronisation with computation; layers compiled one by one overlap already.
    torch._dynamo.config.optimize_ddp = False
    # A layer passes its keys and values on within itself, which Dynamo counts as a side
    # effect. The recomputation of checkpointed layers need not repeat it.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def _compiler_options(config: TrainConfig) -> dict[str, Any] | None:
    """Return Inductor's options for the layers; None for its defaults."""
    if config.device != "cuda":
        return None
    options: dict[str, Any] = {
        # Compute sums of many gradients in one launch. Each sum has its own block size,
        # as with one size for all, they took an H100 ten times longer. Casts to float8
        # are slower in one launch, even with block sizes of their own.
        "combo_kernels": config.combo_kernels and config.float8 == "none",
        "combo_kernel_per_subkernel_blocks": True,
    }
    if hasattr(torch._inductor.config.triton, "mix_order_reduction"):
        # In one kernel, the backward passes of layer norms took an H100 4.5 times as
        # long per token with 256 sequences as with 64.
        options["triton.mix_order_reduction"] = config.mix_order_reduction
    # torch.compile takes a mode or options, not both; only this function gives the
    # options of a mode.
    mode_options: dict[str, Any] = torch._inductor.list_mode_options(
        config.compile_mode
    )
    return mode_options | options


class RedrawnDropout(nn.Dropout):
    """Dropout of compiled layers, whose mask is drawn again in the backward pass.

    For the backward pass it keeps a seed instead of the mask, which takes a byte per
    element.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input with elements zeroed in training, others scaled."""
        if self.training and self.p:
            input = checkpoint(functional.dropout, input, self.p, use_reentrant=False)
        return input


def _redraw_dropout(layer: nn.Module) -> None:
    """Turn each dropout of a layer into a ``RedrawnDropout``."""
    for part in layer.modules():
        if type(part) is nn.Dropout:
            # Change the class in place: a new module would need the name of the old one
            # in its parent, and would lose its hooks.
            part.__class__ = RedrawnDropout
