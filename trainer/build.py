"""Everything that takes a step, put together from a configuration: the same for training, trials and benchmarks."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trainer.attention import VARLEN_NAME, choose_attention, dropout_key
from trainer.config import TrainConfig
from trainer.dataset import SpecialIds
from trainer.flops import ModelWork
from trainer.model import build_config, build_model, family_of, model_layers, window_tokens
from trainer.objective import MaskedLM
from trainer.optimizer import make_optimizer
from trainer.parallel import Ranks, SharedModule, share_module
from trainer.recompute import compile_layers, keep_less
from trainer.step import TrainStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model that is ready to be trained."""

    module: MaskedLM
    shared: SharedModule
    optimizer: torch.optim.Optimizer
    step: TrainStep
    work: ModelWork
    """What a step costs."""
    recipe_changes: tuple[str, ...]
    """What the configuration changed of the model's recipe for the sake of speed, in words."""

    @property
    def model(self) -> PreTrainedModel:
        """The encoder as transformers knows it."""
        return self.module.model


def build_training(config: TrainConfig, vocab_size: int, special_ids: SpecialIds, ranks: Ranks) -> Training:
    """Build the model on this rank's device, the same weights on every rank, and what trains it.

    Raises:
        BadConfig: If the model, the layout or a strategy cannot be had as configured.
    """
    own = build_config(
        config.model, vocab_size=vocab_size, special_ids=special_ids, seq_length_tokens=config.seq_length_tokens
    )
    model_config = build_config(
        config.model,
        vocab_size=vocab_size,
        special_ids=special_ids,
        seq_length_tokens=config.seq_length_tokens,
        attention_dropout=config.attention_dropout,
    )
    family = family_of(model_config)
    attention = choose_attention(config, model_config, ranks.device, known=family is not None)
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        # cuDNN's attention keeps other tensors and takes workspaces that no prediction knows, rounds a dropout of 0.1
        # to 1/16 or 2/16 in torch 2.11, and gives NaN in gradients of some masked widths (pytorch issue 196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(config.seed)
    model = build_model(model_config, ranks.device, VARLEN_NAME if attention.kind == "varlen" else "sdpa")
    # From here on ranks draw different dropout masks.
    torch.manual_seed(config.seed * 1_000_003 + ranks.rank)
    module = MaskedLM(model, config, attention)
    keep_less(model, config)
    layers = model_layers(model)
    if config.compile_layers:
        compile_layers(layers)
    work = model_work(model)  # before its weights are shared out
    shared = share_module(module, layers, config, ranks)
    optimizer = make_optimizer(shared.module, config, ranks)
    return Training(
        module=module,
        shared=shared,
        optimizer=optimizer,
        step=TrainStep(shared, optimizer, config, ranks),
        work=work,
        recipe_changes=_recipe_changes(config, own, ranks),
    )


def model_work(model: PreTrainedModel) -> ModelWork:
    """What a model's loss needs, whatever of it a configuration computes; counted from the model's own matrices.

    Of an unknown architecture all but the head's count as layers. The model's weights must not be shared out yet.
    """
    family, config = family_of(model.config), model.config
    head: list[nn.Module] = (
        [model.get_submodule(name) for name in family.head] if family else _present(model.get_output_embeddings())
    )
    of_head = {id(module) for part in head for module in part.modules()}
    matrices = [module for module in model.modules() if isinstance(module, nn.Linear)]
    window = window_tokens(config)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    of_layers = sum(module.weight.numel() for module in matrices if id(module) not in of_head)
    predicted_only = 0
    narrow = family is not None and kinds[-1] == "full_attention"
    if narrow:
        last = model_layers(model)[-1]
        of_last = sum(module.weight.numel() for module in last.modules() if isinstance(module, nn.Linear))
        predicted_only = of_last - 2 * config.hidden_size**2  # keys and values
    return ModelWork(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_per_token=of_layers - predicted_only,
        weights_per_predicted_token=sum(module.weight.numel() for module in matrices if id(module) in of_head)
        + predicted_only,
        attention_width=config.hidden_size,
        reaches=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        last_layer_narrow=narrow,
    )


def _present(module: nn.Module | None) -> list[nn.Module]:
    return [] if module is None else [module]


def _recipe_changes(config: TrainConfig, own: PretrainedConfig, ranks: Ranks) -> tuple[str, ...]:
    changes = []
    key = dropout_key(own)
    if config.attention_dropout is not None and key and getattr(own, key) != config.attention_dropout:
        changes.append(f"attention dropout {config.attention_dropout:g} instead of the model's {getattr(own, key):g}")
    if config.parallel.gradient_dtype != "fp32" and ranks.world_size > 1:
        changes.append(f"gradients travel in {config.parallel.gradient_dtype}")
    return tuple(changes)
