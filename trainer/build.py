"""Model, optimizer and step, built from a configuration.

Training, trials and benchmarks build them with this same code.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from trainer.activation_checkpointing import checkpoint_activations
from trainer.compilation import check_compile, compile_layers
from trainer.distributed.optimizer import make_optimizer
from trainer.distributed.parallel import ParallelModule, parallelise
from trainer.distributed.step import TrainStep
from trainer.formats.manifest import SpecialIds
from trainer.formats.train_config import TrainConfig
from trainer.matmul_weights import model_work
from trainer.model.attention import (
    choose_attention,
    dropout_key,
    head_dimensions,
    pin_kernels,
)
from trainer.model.encoder import build_model
from trainer.model.encoder_config import build_config
from trainer.model.flash_attention_check import check_flash_attention_4
from trainer.model.flops import ModelWork
from trainer.model.masked_lm import MaskedLM
from trainer.model.varlen import VARLEN_NAME
from trainer.model.verify_packing import verify_packing
from trainer.runtime.ranks import Ranks

_SEED_STRIDE = 1_000_003
"""Distance between the dropout seeds of two runs whose seeds differ by 1. It exceeds
any number of ranks, so that no rank of one run draws the masks of the other run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Model with its optimizer and step, ready for training."""

    module: MaskedLM
    """Model with its loss, without the wrapper of its parallel strategy."""
    parallel_module: ParallelModule
    """The same model in the wrapper of its parallel strategy."""
    optimizer: torch.optim.Optimizer
    step: TrainStep
    """Optimizer step, which computes gradients and updates the weights."""
    work: ModelWork
    """Sizes of the model from which the FLOPs of a step follow."""
    recipe_changes: Sequence[str]
    """Settings that change the model's recipe for speed, as text, such as another
    attention dropout."""


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
    module = _build_module(config, model_config, ranks)

    work = model_work(module.model)  # before its weights are sharded
    parallel_module = parallelise(module, module.layers, config, ranks)
    optimizer = make_optimizer(parallel_module.module, config, ranks)
    module.weights_changed()  # DDP has overwritten the weights by those of rank 0
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


def _build_module(
    config: TrainConfig, model_config: PretrainedConfig, ranks: Ranks
) -> MaskedLM:
    """Build the model with its loss on this rank's device, and compile its layers.

    On a GPU, this also sets torch's precision of matmuls and its attention kernels, for
    the whole process.
    """
    attention = choose_attention(
        config, model_config, ranks.device, verify_packing(model_config)
    )
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        pin_kernels()
        if attention.kind == "fa4":
            check_flash_attention_4(ranks.device, head_dimensions(model_config))

    torch.manual_seed(config.seed)  # the same weights on every rank
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
    return module


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
