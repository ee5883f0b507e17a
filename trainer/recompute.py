"""Which activations backward computes again, and layers compiled by ``torch.compile``."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from trainer.config import TrainConfig
from trainer.errors import BadConfig

WARM_UP_STEPS = 3
"""Optimizer steps in which compiling is expected."""


def keep_less(model: PreTrainedModel, config: TrainConfig) -> None:
    """Set up activation checkpointing.

    With compiled layers, ``selective`` needs nothing: the compiler keeps the results of matrix products and computes
    cheap operations again by itself, and cannot be told to within its graphs.

    Raises:
        BadConfig: If the architecture has no checkpointing.
    """
    if config.checkpointing == "none" or (config.checkpointing == "selective" and config.compile_layers):
        return
    if not model.supports_gradient_checkpointing:
        raise BadConfig(
            f"transformers has no activation checkpointing for {model.config.model_type!r}",
            next_step="Use --set train.checkpointing=none.",
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if config.checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    model.config.use_cache = False  # decoders have one, and transformers would warn of it
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its earlier name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile each layer in place; they are alike, so one graph serves all."""
    # It would cut every layer at the edges of gradient buckets, to overlap what layers overlap already.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        layer.compile(fullgraph=True)


class GraphCounter:
    """Counts what is compiled after the first steps: shapes or settings that changed, and cost minutes."""

    def __init__(self) -> None:
        self._steps = 0
        self._expected = 0

    def stepped(self) -> None:
        """A training step was made."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._expected = _graphs_compiled()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What the block compiles is none of training's."""
        before = _graphs_compiled()
        yield
        self._expected += _graphs_compiled() - before

    @property
    def recompilations(self) -> int:
        """Graphs compiled after the first steps."""
        return _graphs_compiled() - self._expected


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@functools.cache
def _kept() -> frozenset[Any]:
    """What costs much to compute and little to keep: matrix products and attention, whichever this torch has."""
    names = {
        "aten": (
            "mm",
            "addmm",
            "bmm",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
        "torch_attn": ("_varlen_attn",),
    }
    spaces = {space: getattr(torch.ops, space) for space in names}
    return frozenset(
        getattr(spaces[space], name).default
        for space, wanted in names.items()
        for name in wanted
        if hasattr(spaces[space], name)
    )


def _policy(_: object, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:  # noqa: ANN401 - torch's own
    return CheckpointPolicy.MUST_SAVE if operation in _kept() else CheckpointPolicy.PREFER_RECOMPUTE
