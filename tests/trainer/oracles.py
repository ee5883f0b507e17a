"""Plain computations that tests compare the trainer's fast ones with.

``SHAPES`` and ``config_of`` are models small enough for a CPU, ``attend_within_edges``
is attention under a mask instead of a varlen kernel, and the other functions read the
loss, gradient and state of a training.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import pytest
import torch
from torch.nn import functional

from trainer.build import Training, build_training
from trainer.checkpoint.tensors import tensor_shards
from trainer.config.train_config import ModelSettings, TrainConfig
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.distributed.device_events import DeviceEvent
from trainer.distributed.optimizer import unwrap_optimizer
from trainer.distributed.ranks import join_ranks
from trainer.distributed.step import StepResult
from trainer.model.attention import choose_attention


class Learned(NamedTuple):
    """Loss of a step, and the gradient of each parameter by name."""

    loss: float
    gradients: dict[str, torch.Tensor]


FAMILIES = ("bert", "roberta", "modernbert")
"""Families with which tests cover the features that depend on the architecture."""
_SMALL = {"hidden_size": 32, "num_attention_heads": 2}
_BERT = _SMALL | {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ROBERTA = _BERT | {"model_type": "roberta", "max_position_embeddings": 514}
SHAPES = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA | {"model_type": "xlm-roberta"},
    "megatron-bert": _BERT | {"model_type": "megatron-bert"},
    "mpnet": _BERT | {"model_type": "mpnet"},
    "albert": _BERT | {"model_type": "albert", "embedding_size": 16},
    "electra": _BERT | {"model_type": "electra", "embedding_size": 32},
    "esm": (
        _BERT
        | {
            "model_type": "esm",
            "position_embedding_type": "rotary",
            "token_dropout": True,
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
    # The first and the last layer attend to whole sequences, the others to 4 tokens on
    # either side.
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
    "eurobert": (
        _SMALL
        | {
            "model_type": "eurobert",
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "num_key_value_heads": 1,
        }
    ),
}
"""Transformers configs of tiny models without dropout, by family."""


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
    min_length=0,
):
    """Compute attention within documents under a mask, in place of a varlen kernel.

    Its arguments are those of torch's ``varlen_attn``, and it is compiled once for all
    numbers of documents. Like the kernels, it requires that the edges of documents
    cover all positions, and that no document exceeds the maximum lengths.

    ``min_length`` is the least length of a document: 1 for kernels that hang on empty
    documents.

    Shapes: T queries and U keys, H heads, E elements of a head.
    """
    if not torch.compiler.is_compiling():
        _check_edges(query_edges, len(query_THE), min_length, max_query_length)
        _check_edges(key_edges, len(key_THE), min_length, max_key_length)
    query_document_T = _document_of_position(query_edges, len(query_THE))
    key_document_U = _document_of_position(key_edges, len(key_THE))
    is_allowed_TU = query_document_T[:, None] == key_document_U
    reach = window_size[0]
    if 0 <= reach < max_key_length:
        # Only the sparse last layer has fewer queries than keys, and it has no window.
        position_U = torch.arange(len(key_THE))
        distance_UU = (position_U[:, None] - position_U).abs()
        is_allowed_TU = is_allowed_TU & (distance_UU <= reach)
    query_HTE, key_HUE, value_HUE = (
        tensor.transpose(0, 1) for tensor in (query_THE, key_THE, value_THE)
    )
    return functional.scaled_dot_product_attention(
        query_HTE, key_HUE, value_HUE, attn_mask=is_allowed_TU, scale=scale
    ).transpose(0, 1)


def choose_varlen(
    monkeypatch: pytest.MonkeyPatch, kind: Literal["varlen", "fa3"] = "varlen"
) -> None:
    """Let trainings use attention within documents, without its kernels."""
    min_length = 1 if kind == "fa3" else 0  # FlashAttention 3 hangs on empty documents
    attend = functools.partial(attend_within_edges, min_length=min_length)
    monkeypatch.setattr("trainer.model.varlen.varlen_attn", attend)

    def choose(*arguments):
        return dataclasses.replace(choose_attention(*arguments), kind=kind)

    monkeypatch.setattr("trainer.build.choose_attention", choose)


def _check_edges(edges, positions: int, min_length: int, max_length: int) -> None:
    """Assert that documents cover all positions, and that their lengths are valid."""
    assert (int(edges[0]), int(edges[-1])) == (0, positions)
    lengths = edges.diff()
    assert min_length <= int(lengths.min()) <= int(lengths.max()) <= max_length


def _document_of_position(edges, positions: int) -> torch.Tensor:
    """Return the number of the document, counted from 1, that has each position."""
    position_T = torch.arange(positions, dtype=edges.dtype)
    return torch.searchsorted(edges, position_T, right=True)


def config_of(family: str = "bert", **changes) -> TrainConfig:
    """Return the configuration of a tiny model without dropout.

    An optimizer step is one micro-batch of 8 packed sequences. Gradients are not
    clipped.
    """
    settings = {
        "model": ModelSettings(name="m", config=SHAPES[family]),
        "seq_length_tokens": 64,
        "micro_batch_size": 8,
        "global_batch_size": 8,
        "layout": "packed",
        "max_grad_norm": 1e9,  # above any norm
    }
    return TrainConfig(**settings | changes)


def training_of(config: TrainConfig, dataset: TokenDataset) -> Training:
    """Build a training of one rank."""
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
    return [
        source.__getitems__(sequences)
        for sequences in micro_batch_plans(dataset, config, plan, 0, steps=steps)
    ]


def result_of(
    loss=2.0,
    norm=1.0,
    *,
    applied=True,
    sums=(),
    partial=None,
    computed_s=0.0,
    gradients_sent_s=None,
) -> StepResult:
    """Return the result of a step that was not computed.

    The step began at 0 s on the clock of the device.
    """
    began = DeviceEvent(0.0)
    computed = DeviceEvent(computed_s)
    gradients_sent = None if gradients_sent_s is None else DeviceEvent(gradients_sent_s)
    return StepResult(
        loss=torch.tensor(loss, dtype=torch.float64),
        grad_norm=torch.tensor(norm, dtype=torch.float64),
        applied=torch.tensor(applied),
        sums=torch.tensor(sums, dtype=torch.float64),
        partial=partial,
        began=began,
        count_requested=began,
        count_received=began,
        gradients_sent=gradients_sent,
        reduced=computed,
        updated=computed,
    )


def gradients_of(training: Training, batches: list[MicroBatch]) -> Learned:
    """Take one step, and return its loss and the gradients that the optimizer gets."""
    gradients: dict[str, torch.Tensor] = {}

    def record_gradients(*_):
        divisor = unwrap_optimizer(training.optimizer).grad_scale
        for name, parameter in training.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad / divisor

    handle = training.optimizer.register_step_pre_hook(record_gradients)
    result = training.step.run(batches, 0.0)
    handle.remove()
    return Learned(loss=float(result.loss), gradients=gradients)


def state_of_training(training: Training) -> dict[str, torch.Tensor]:
    """Return a copy of the weights and of the optimizer's state, by name."""
    ranks = join_ranks(config_of(), environment={})
    return {shard.name: shard.local.clone() for shard in tensor_shards(training, ranks)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return True if two states are equal to the last bit."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    """Return the L2 norm of a whole gradient."""
    squares = (float((gradient.double() ** 2).sum()) for gradient in gradients.values())
    return sum(squares) ** 0.5


def learned(config: TrainConfig, dataset: TokenDataset) -> Learned:
    """Return loss and gradients of the first step of a new training."""
    return gradients_of(training_of(config, dataset), micro_batches(dataset, config))


def check_alike(actual: Learned, expected: Learned, *, loss=1e-6, gradient=1e-6):
    """Assert that losses and gradients agree.

    They may differ by the shares ``loss`` and ``gradient``, which are by default those
    of sums in fp32 in another order.
    """
    assert actual.loss == pytest.approx(expected.loss, rel=loss)
    assert relative_distance(expected.gradients, actual.gradients) < gradient


def relative_distance(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> float:
    """Return the L2 distance of two whole gradients over the norm of the first."""
    assert first.keys() == second.keys()
    differences = {name: first[name] - second[name] for name in first}
    return norm_of(differences) / norm_of(first)
