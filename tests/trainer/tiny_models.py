"""Models that are small enough for a CPU, their trainings and their micro-batches."""

from trainer.build import Training, build_training
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import micro_batch_plans
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.formats.train_config import ModelSettings, TrainConfig
from trainer.runtime.ranks import join_ranks

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


def config_of(family: str = "bert", **changes) -> TrainConfig:
    """Return the configuration of a tiny model without dropout.

    An optimizer step is one micro-batch of 8 packed sequences. Gradients are not
    clipped.

    Args:
        family: Key of ``SHAPES``.
        changes: Settings other than these.
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
        for sequences in micro_batch_plans(dataset, config, plan, rank=0, steps=steps)
    ]
