"""Model, optimizer and step built from a configuration, the same for training, trials and benchmarks."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from trainer.config.resolve import missing_for_compile
from trainer.config.train_config import TrainConfig
from trainer.data.dataset import SpecialIds
from trainer.distributed.optimizer import make_optimizer
from trainer.distributed.ranks import ParallelModule, Ranks, parallelise
from trainer.distributed.step import TrainStep
from trainer.errors import BadConfig
from trainer.model.attention import (
    VARLEN_NAME,
    choose_attention,
    dropout_key,
    pin_kernels,
)
from trainer.model.encoder import (
    build_config,
    build_model,
    model_head,
    model_layers,
    window_tokens,
)
from trainer.model.families import FAMILIES
from trainer.model.flops import ModelWork
from trainer.model.masked_lm import MaskedLM
from trainer.model.packing import verify_packing
from trainer.model.precision import COMPILER_SAVES_COMPACT

WARM_UP_STEPS = 3
"""Number of first optimizer steps in which compilation is expected."""


def checkpoint_activations(model: PreTrainedModel, config: TrainConfig) -> None:
    """Set up activation checkpointing.

    Raise ``BadConfig`` for an architecture without it.
    """
    # Within its graphs, the compiler itself keeps the results of matmuls and recomputes
    # cheap operations.
    if config.activation_checkpointing in (
        "none",
        "selective" if config.compiled else "none",
    ):
        return
    if not model.supports_gradient_checkpointing:
        what = (
            "transformers has no activation checkpointing for"
            f" {model.config.model_type!r}"
        )
        raise BadConfig(what, next_step="Use --set train.activation_checkpointing=none")
    options: dict[str, Any] = {"use_reentrant": False}
    if config.activation_checkpointing == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _policy
        )
    model.config.use_cache = False  # only for decoders; transformers would warn
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its earlier name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


class RedrawnDropout(nn.Dropout):
    """Dropout of compiled layers, which keep a seed for backward instead of the mask, a byte per element."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input with elements zeroed in training, others scaled."""
        if self.training and self.p:
            input = checkpoint(functional.dropout, input, self.p, use_reentrant=False)
        return input


class GraphCounter:
    """Counter of graphs compiled after the first steps, for changed shapes or settings, which cost minutes."""

    def __init__(self) -> None:
        self._steps = 0
        self._expected = 0

    def stepped(self) -> None:
        """Count a training step."""
        self._steps += 1
        if self._steps <= WARM_UP_STEPS:
            self._expected = _graphs_compiled()

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Exclude graphs compiled in the block, such as by an evaluation."""
        before = _graphs_compiled()
        yield
        self._expected += _graphs_compiled() - before

    @property
    def recompilations(self) -> int:
        """Number of graphs compiled after the first steps."""
        return _graphs_compiled() - self._expected


def _graphs_compiled() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@functools.cache
def _kept() -> frozenset[Any]:
    """Return the operations to keep with ``selective``: the matmuls and attention kernels of this torch."""
    kinds = (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    )
    names = ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{kind}" for kind in kinds))
    found = [getattr(torch.ops.aten, name, None) for name in names]
    found.append(getattr(torch.ops.torch_attn, "_varlen_attn", None))
    return frozenset(operation.default for operation in found if operation is not None)


def _policy(_: object, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if operation in _kept()
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Model with its optimizer and step, ready for training."""

    module: MaskedLM
    parallel_module: ParallelModule
    optimizer: torch.optim.Optimizer
    step: TrainStep
    work: ModelWork
    recipe_changes: Sequence[str]
    """Changes of the model's recipe for speed, as text, such as another attention
    dropout."""


def build_training(
    config: TrainConfig, vocab_size: int, special_ids: SpecialIds, ranks: Ranks
) -> Training:
    """Build the model, with the same weights on every rank, its optimizer and step.

    Raises:
        BadConfig: If invalid.
    """
    configured = functools.partial(
        build_config,
        config.model,
        vocab_size=vocab_size,
        special_ids=special_ids,
        seq_length_tokens=config.seq_length_tokens,
    )
    if (
        config.attention == "fa3"
        and config.compiled
        and config.compile_mode == "reduce-overhead"
    ):
        next_step = "Use --set train.compile_mode=default or --set train.attention=auto"
        raise BadConfig(
            "CUDA graphs need equal shapes, which attention = 'fa3' does not have",
            next_step=next_step,
        )
    if (
        config.compiled
        and ranks.device.type == "cuda"
        and (missing := missing_for_compile("cuda"))
    ):
        raise BadConfig(
            f"layers cannot be compiled: {missing}",
            next_step="Use --set train.compile=false",
        )
    own, model_config = (
        configured(),
        configured(attention_dropout=config.attention_dropout),
    )
    attention = choose_attention(
        config, model_config, ranks.device, verify_packing(model_config)
    )
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        pin_kernels(attention.kind)
    torch.manual_seed(config.seed)
    model = build_model(
        model_config,
        ranks.device,
        VARLEN_NAME if attention.uses_document_edges else "sdpa",
    )
    # From here on, ranks draw different dropout masks.
    torch.manual_seed(config.seed * 1_000_003 + ranks.rank)
    module = MaskedLM(model, config, attention)
    checkpoint_activations(model, config)
    if config.compiled:
        # It would split every layer at bucket boundaries for overlap that separate
        # layers already have.
        torch._dynamo.config.optimize_ddp = False
        # Checkpointed layers hand keys and values on within a layer, which
        # recomputation need not do again.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        options = None
        if config.device == "cuda":
            # Sums of many gradients in one launch. With one block size for all, an H100
            # took ten times longer for them; float8 casts were slower combined even
            # with their own.
            together = {
                "combo_kernels": config.float8 == "none",
                "combo_kernel_per_subkernel_blocks": True,
            }
            options = torch._inductor.list_mode_options(config.compile_mode) | together
        redraws = COMPILER_SAVES_COMPACT and config.activation_checkpointing != "full"
        for layer in module.layers:  # identical layers share one graph
            for part in layer.modules():
                if redraws and type(part) is nn.Dropout:
                    part.__class__ = RedrawnDropout
            layer.compile(fullgraph=True, options=options)
    changes, key = [], dropout_key(own)
    if (
        config.attention_dropout is not None
        and key
        and getattr(own, key) != config.attention_dropout
    ):
        changes.append(
            f"attention dropout {config.attention_dropout:g} instead of the model's"
            f" {getattr(own, key):g}"
        )
    if module.residual_dtype == torch.bfloat16:
        changes.append("the residual stream is in bf16")
    if config.float8 != "none":
        changes.append(f"linear layers compute in float8 ({config.float8})")
    if config.parallel.gradient_dtype != "fp32" and ranks.world_size > 1:
        changes.append(
            f"gradients are synchronised in {config.parallel.gradient_dtype}"
        )
    work = model_work(model)  # before its weights are sharded
    parallel_module = parallelise(module, module.layers, config, ranks)
    optimizer = make_optimizer(parallel_module.module, config, ranks)
    module.weights_changed()  # DDP has sent those of rank 0
    step = TrainStep(
        parallel_module,
        optimizer,
        config,
        ranks,
        weights_changed=module.weights_changed,
    )
    return Training(
        module=module,
        parallel_module=parallel_module,
        optimizer=optimizer,
        step=step,
        work=work,
        recipe_changes=changes,
    )


def model_work(model: PreTrainedModel) -> ModelWork:
    """Return the work of a model's loss, from its unsharded matrices.

    All but the head's count as layers.
    """
    config = model.config
    in_head = _weights(model_head(model))
    window = window_tokens(config)
    kinds = (
        getattr(config, "layer_types", None)
        or ["full_attention"] * config.num_hidden_layers
    )
    narrow = (
        FAMILIES.get(config.model_type) is not None and kinds[-1] == "full_attention"
    )
    # Keys and values of the last layer are needed for every token.
    predicted_only = (
        _weights(model_layers(model)[-1:]) - 2 * config.hidden_size**2 if narrow else 0
    )
    return ModelWork(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_per_token=_weights([model]) - in_head - predicted_only,
        weights_per_predicted_token=in_head + predicted_only,
        attention_width=config.hidden_size,
        reaches=tuple(
            window if kind == "sliding_attention" else None for kind in kinds
        ),
        last_layer_narrow=narrow,
    )


def _weights(parts: Sequence[nn.Module]) -> int:
    """Return the number of elements of all linear weights in the modules."""
    modules = [module for part in parts for module in part.modules()]
    return sum(
        module.weight.numel() for module in modules if isinstance(module, nn.Linear)
    )
