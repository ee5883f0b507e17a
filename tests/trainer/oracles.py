"""What tests hold the trainer's fast ways against: plain ones, and models small enough
for a CPU."""

import pytest
import torch
from torch.nn import functional

from trainer.build import Training, build_training
from trainer.checkpoint.tensors import tensor_shards
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import MicroBatch, MicroBatchSource, micro_batch_plans
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.ranks import DeviceEvent, join_ranks
from trainer.distributed.step import StepResult

Learned = tuple[float, dict[str, torch.Tensor]]
FAMILIES = ("bert", "roberta", "modernbert")
_SMALL = {"hidden_size": 32, "num_attention_heads": 2}
SHAPES = {
    "bert": (
        _SMALL
        | {
            "model_type": "bert",
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }
    ),
    "modernbert": (
        _SMALL
        | {
            "model_type": "modernbert",
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "local_attention": 8,
            "global_attn_every_n_layers": 3,
        }
    ),
    "distilbert": {
        "model_type": "distilbert",
        "n_layers": 2,
        "dim": 32,
        "n_heads": 2,
        "hidden_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
SHAPES["roberta"] = SHAPES["bert"] | {
    "model_type": "roberta",
    "max_position_embeddings": 514,
}
SHAPES["xlm-roberta"] = SHAPES["roberta"] | {"model_type": "xlm-roberta"}
SHAPES["megatron-bert"] = SHAPES["bert"] | {"model_type": "megatron-bert"}
SHAPES["esm"] = SHAPES["bert"] | {
    "model_type": "esm",
    "position_embedding_type": "rotary",
    "token_dropout": True,
}
SHAPES["eurobert"] = _SMALL | {
    "model_type": "eurobert",
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_key_value_heads": 1,
}
SHAPES["albert"] = SHAPES["bert"] | {"model_type": "albert", "embedding_size": 16}
SHAPES["mpnet"] = SHAPES["bert"] | {"model_type": "mpnet"}
SHAPES["electra"] = SHAPES["bert"] | {"model_type": "electra", "embedding_size": 32}


def attend_within_edges(
    query_THE,
    key_THE,
    value_THE,
    query_edges,
    key_edges,
    max_query_length,
    max_key_length,
    *,
    scale=None,
    window_size,
    shortest=0,
):
    """Varlen attention under a mask, which compiles whatever the number of documents
    is."""
    if not torch.compiler.is_compiling():
        for edges, tensor, most in (
            (query_edges, query_THE, max_query_length),
            (key_edges, key_THE, max_key_length),
        ):
            assert (int(edges[0]), int(edges[-1])) == (0, len(tensor))
            assert (
                shortest <= int(edges.diff().min()) <= int(edges.diff().max()) <= most
            )
    asks, tells = (
        torch.searchsorted(
            edges, torch.arange(len(tensor), dtype=edges.dtype), right=True
        )
        for edges, tensor in ((query_edges, query_THE), (key_edges, key_THE))
    )
    allowed = asks[:, None] == tells
    if 0 <= window_size[0] < max_key_length:  # all places ask
        place = torch.arange(len(key_THE))
        allowed = allowed & ((place[:, None] - place).abs() <= window_size[0])
    query, key, value = (
        tensor.transpose(0, 1) for tensor in (query_THE, key_THE, value_THE)
    )
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=scale
    ).transpose(0, 1)


def config_of(family: str = "bert", **changes) -> TrainConfig:
    """A tiny model of an architecture, without dropout."""
    settings = {
        "model": ModelSettings(name="m", config=SHAPES[family]),
        "seq_length_tokens": 64,
        "micro_batch_size": 8,
        "global_batch_size": 8,
        "layout": "packed",
        "max_grad_norm": 1e9,
    }
    return TrainConfig(**settings | changes)


def training_of(config: TrainConfig, dataset: TokenDataset) -> Training:
    """Ready to train, alone."""
    ranks = join_ranks(config, environment={})
    return build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )


def micro_batches(
    dataset: TokenDataset, config: TrainConfig, steps: int = 1
) -> list[MicroBatch]:
    """Those of the first optimizer steps."""
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    return [
        source.__getitems__(one)
        for one in micro_batch_plans(dataset, config, plan, 0, steps=steps)
    ]


def result_of(
    loss=2.0,
    norm=1.0,
    *,
    applied=True,
    sums=(),
    partial=None,
    computed_s=0.0,
    departed_s=None,
) -> StepResult:
    """What a step was that nobody took."""
    began, computed = DeviceEvent(0.0), DeviceEvent(computed_s)
    departed = None if departed_s is None else DeviceEvent(departed_s)
    loss, norm, sums = (
        torch.tensor(numbers, dtype=torch.float64) for numbers in (loss, norm, sums)
    )
    return StepResult(
        loss=loss,
        grad_norm=norm,
        applied=torch.tensor(applied),
        sums=sums,
        partial=partial,
        began=began,
        count_requested=began,
        count_received=began,
        departed=departed,
        reduced=computed,
        updated=computed,
    )


def gradients_of(training: Training, batches: list[MicroBatch]) -> Learned:
    """Loss and gradients of one step, as the optimizer gets them."""
    seen: dict[str, torch.Tensor] = {}

    def look(*_):
        named, divisor = (
            training.module.named_parameters(),
            unwrap_optimizer(training.optimizer).grad_scale,
        )
        seen.update(
            {
                name: parameter.grad / divisor
                for name, parameter in named
                if parameter.grad is not None
            }
        )

    handle = training.optimizer.register_step_pre_hook(look)
    result = training.step.run(batches, 0.0)
    handle.remove()
    return float(result.loss), seen


def state_of_training(training: Training) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's state, by name, as they are now."""
    return {
        one.name: one.local.clone()
        for one in tensor_shards(training, join_ranks(config_of(), environment={}))
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return (
        sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values())
        ** 0.5
    )


def learned(config: TrainConfig, dataset: TokenDataset) -> Learned:
    """Loss and gradients of the first step of a training."""
    return gradients_of(training_of(config, dataset), micro_batches(dataset, config))


def check_alike(one: Learned, other: Learned, *, loss=1e-6, gradient=1e-6) -> None:
    """Assert that losses and gradients differ by less than such shares."""
    assert one[0] == pytest.approx(other[0], rel=loss)
    assert relative_distance(other[1], one[1]) < gradient


def relative_distance(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> float:
    """L2 distance of two whole gradients over the norm of the first."""
    assert first.keys() == second.keys()
    return norm_of({name: first[name] - second[name] for name in first}) / norm_of(
        first
    )
