"""Plain implementations that tests compare the trainer's fast ones with.

And models small enough for a CPU.
"""

import pytest
import torch
from torch.nn import functional

from trainer.build import Training, build_training
from trainer.checkpoint.tensors import tensor_shards
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import MicroBatch, MicroBatchSource, micro_batch_plans
from trainer.distributed.device_events import DeviceEvent
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.ranks import join_ranks
from trainer.distributed.step import StepResult

Learned = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients, by name, of one step."""
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
    """Varlen attention under a mask.

    Its graph does not depend on the number of documents.
    """
    if not torch.compiler.is_compiling():
        _check_edges(query_edges, len(query_THE), shortest, max_query_length)
        _check_edges(key_edges, len(key_THE), shortest, max_key_length)
    query_documents = _document_of_each_token(query_edges, len(query_THE))
    key_documents = _document_of_each_token(key_edges, len(key_THE))
    allowed = query_documents[:, None] == key_documents
    reach = window_size[0]
    if 0 <= reach < max_key_length:  # then every token has a query
        positions = torch.arange(len(key_THE))
        distances = (positions[:, None] - positions).abs()
        allowed = allowed & (distances <= reach)
    return functional.scaled_dot_product_attention(
        query_THE.transpose(0, 1),
        key_THE.transpose(0, 1),
        value_THE.transpose(0, 1),
        attn_mask=allowed,
        scale=scale,
    ).transpose(0, 1)


def _check_edges(edges, tokens, shortest, longest) -> None:
    """Assert that edges split so many tokens into documents of possible lengths."""
    assert (int(edges[0]), int(edges[-1])) == (0, tokens)
    lengths = edges.diff()
    assert shortest <= int(lengths.min()) <= int(lengths.max()) <= longest


def _document_of_each_token(edges, tokens) -> torch.Tensor:
    return torch.searchsorted(
        edges, torch.arange(tokens, dtype=edges.dtype), right=True
    )


def config_of(family: str = "bert", **changes) -> TrainConfig:
    """Settings of a tiny model of an architecture, without dropout."""
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
    """Build a training on a single rank."""
    ranks = join_ranks(config, environment={})
    return build_training(
        config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks
    )


def micro_batches(
    dataset: TokenDataset, config: TrainConfig, steps: int = 1
) -> list[MicroBatch]:
    """Return the micro-batches of the first optimizer steps."""
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    plans = micro_batch_plans(dataset, config, plan, 0, steps=steps)
    return [source.__getitems__(micro_batch_plan) for micro_batch_plan in plans]


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
    """Make up the result of a step."""
    began = DeviceEvent(0.0)
    computed = DeviceEvent(computed_s)
    return StepResult(
        loss=torch.tensor(loss, dtype=torch.float64),
        grad_norm=torch.tensor(norm, dtype=torch.float64),
        applied=torch.tensor(applied),
        sums=torch.tensor(sums, dtype=torch.float64),
        partial=partial,
        began=began,
        count_requested=began,
        count_received=began,
        departed=None if departed_s is None else DeviceEvent(departed_s),
        reduced=computed,
        updated=computed,
    )


def gradients_of(training: Training, batches: list[MicroBatch]) -> Learned:
    """Take a step; return its loss and the gradients as the optimizer gets them."""
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(*_):
        divisor = unwrap_optimizer(training.optimizer).grad_scale
        for name, parameter in training.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad / divisor

    handle = training.optimizer.register_step_pre_hook(keep_gradients)
    result = training.step.run(batches, 0.0)
    handle.remove()
    return float(result.loss), gradients


def state_of_training(training: Training) -> dict[str, torch.Tensor]:
    """Copy the weights and the optimizer's state, by name."""
    ranks = join_ranks(config_of(), environment={})
    return {shard.name: shard.local.clone() for shard in tensor_shards(training, ranks)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    squares = [float((gradient.double() ** 2).sum()) for gradient in gradients.values()]
    return sum(squares) ** 0.5


def learned(config: TrainConfig, dataset: TokenDataset) -> Learned:
    """Return the loss and gradients of a training's first step."""
    return gradients_of(training_of(config, dataset), micro_batches(dataset, config))


def check_alike(first: Learned, second: Learned, *, loss=1e-6, gradient=1e-6) -> None:
    """Assert that losses and gradients differ by less than such shares."""
    first_loss, first_gradients = first
    second_loss, second_gradients = second
    assert first_loss == pytest.approx(second_loss, rel=loss)
    assert relative_distance(second_gradients, first_gradients) < gradient


def relative_distance(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> float:
    """Return the L2 distance of two whole gradients over the norm of the first."""
    assert first.keys() == second.keys()
    difference = {name: first[name] - second[name] for name in first}
    return norm_of(difference) / norm_of(first)
