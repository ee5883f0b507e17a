"""Model, optimizer and step, built from a configuration.

Training, trials and benchmarks build them with this same code.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from transformers import PretrainedConfig, PreTrainedModel

from trainer.compilation import check_compile, compile_layers
from trainer.config.train_config import TrainConfig
from trainer.data.manifest import SpecialIds
from trainer.distributed.optimizer import make_optimizer
from trainer.distributed.parallel import ParallelModule, parallelise
from trainer.distributed.ranks import Ranks
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

_SEED_STRIDE = 1_000_003
"""Distance of the dropout seeds of runs whose seeds are neighbours: above any number of
ranks, so no rank of one run draws the masks of a rank of the other."""


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
        BadConfig: If settings cannot be used with each other, the model or the device.
    """
    check_compile(config, ranks)
    build_model_config = functools.partial(
        build_config,
        config.model,
        vocab_size=vocab_size,
        special_ids=special_ids,
        seq_length_tokens=config.seq_length_tokens,
    )
    original_config = build_model_config()
    model_config = build_model_config(attention_dropout=config.attention_dropout)
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
    torch.manual_seed(config.seed * _SEED_STRIDE + ranks.rank)
    module = MaskedLM(model, config, attention)
    checkpoint_activations(model, config)
    if config.compiled:
        compile_layers(module.layers, config)

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
        recipe_changes=_recipe_changes(config, original_config, module, ranks),
    )


def checkpoint_activations(model: PreTrainedModel, config: TrainConfig) -> None:
    """Set up activation checkpointing.

    Raises:
        BadConfig: If the architecture has none.
    """
    kind = config.activation_checkpointing
    if kind == "none":
        return
    if kind == "selective" and config.compiled:
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
    if kind == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_costly_operations
        )
    model.config.use_cache = False  # only for decoders; transformers would warn
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its earlier name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _keep_costly_operations(
    _: object, operation: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    """Return the policy of selective checkpointing for an operation."""
    if operation in _costly_operations():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _costly_operations() -> frozenset[Any]:
    """Return the matmuls and attention kernels that this version of torch has."""
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
    operations.append(getattr(torch.ops.torch_attn, "_varlen_attn", None))
    return frozenset(
        operation.default for operation in operations if operation is not None
    )


def _recipe_changes(
    config: TrainConfig,
    original_config: PretrainedConfig,
    module: MaskedLM,
    ranks: Ranks,
) -> list[str]:
    """Return the settings that change the model's recipe for speed, as text."""
    changes = []
    key = dropout_key(original_config)
    if config.attention_dropout is not None and key is not None:
        original_dropout = getattr(original_config, key)
        if config.attention_dropout != original_dropout:
            changes.append(
                f"attention dropout {config.attention_dropout:g} instead of the"
                f" model's {original_dropout:g}"
            )
    if module.residual_dtype == torch.bfloat16:
        changes.append("the residual stream is in bf16")
    if config.float8 != "none":
        changes.append(f"linear layers compute in float8 ({config.float8})")
    gradient_dtype = config.parallel.gradient_dtype
    if gradient_dtype != "fp32" and ranks.world_size > 1:
        changes.append(f"gradients are synchronised in {gradient_dtype}")
    return changes


def model_work(model: PreTrainedModel) -> ModelWork:
    """Return the sizes that the FLOPs of a model's loss follow from.

    A token costs a multiplication and an addition for each element of the linear
    weights that it is multiplied with, so only these elements are counted; embeddings
    are looked up. The model's weights must not be sharded yet.
    """
    config = model.config
    window = window_tokens(config)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["full_attention"] * config.num_hidden_layers

    weights_per_predicted_token = _linear_weights(model_head(model))
    last_layer_narrow = (
        FAMILIES.get(config.model_type) is not None
        and layer_types[-1] == "full_attention"
    )
    if last_layer_narrow:
        # The last layer's keys and values are needed for every token: two square
        # matrices of the hidden size.
        key_and_value_weights = 2 * config.hidden_size**2
        weights_per_predicted_token += (
            _linear_weights(model_layers(model)[-1:]) - key_and_value_weights
        )
    return ModelWork(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_per_token=_linear_weights([model]) - weights_per_predicted_token,
        weights_per_predicted_token=weights_per_predicted_token,
        attention_width=config.hidden_size,
        reaches=tuple(
            window if layer_type == "sliding_attention" else None
            for layer_type in layer_types
        ),
        last_layer_narrow=last_layer_narrow,
    )


def _linear_weights(parts: Sequence[nn.Module]) -> int:
    """Return the number of elements of all linear weights in the modules."""
    weights = 0
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
    return weights
