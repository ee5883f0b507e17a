"""Alternative settings of a model, each with its predicted largest micro-batch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.memory.predictor import LargestSize, Predictor
from trainer.config.train_config import TrainConfig
from trainer.model.families import FAMILIES
from trainer.record.progress import Update

_SETTINGS = ("precision", "attention", "activation_checkpointing", "mlm_head")
"""Settings that are combined."""


def alternatives(predictor: Predictor, update: Update) -> Iterator[Mapping[str, Any]]:
    """Yield the largest micro-batch of every combination of settings, for each model.

    Each has the keys of ``Answer.what_if``.
    """
    combinations = [
        (config, settings)
        for config in predictor.request.configs
        for settings in _combinations(config)
    ]
    for number, (config, settings) in enumerate(combinations):
        words = f"{config.model.name} {' '.join(settings.values())}"
        update(number, len(combinations), f"alternatives: {words}")
        yield from _by_layout(predictor, config, settings)


def _combinations(config: TrainConfig) -> Iterator[dict[str, str]]:
    """Yield the combinations of settings that exist for a model."""
    attentions: tuple[str, ...] = ("sdpa",)
    if not _is_known(config):
        # Encoders that this project does not know keep their own attention.
        attentions = ("auto",)
    elif config.device == "cuda":
        attentions = ("varlen", "sdpa")
    for values in itertools.product(
        ("bf16", "fp32"),
        attentions,
        ("none", "selective", "full"),
        ("sparse", "dense"),
    ):
        settings = dict(zip(_SETTINGS, values, strict=True))
        # There is no such kernel.
        if settings["precision"] == "fp32" and settings["attention"] == "varlen":
            continue
        yield settings


def _by_layout(
    predictor: Predictor, config: TrainConfig, settings: Mapping[str, str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of one combination, one for each layout."""
    is_known = _is_known(config)
    is_varlen = settings["attention"] == "varlen"
    changes: dict[str, object] = {**settings}
    if is_varlen:
        # Attention kernels of variable length have no dropout.
        changes["attention_dropout"] = 0.0
    # The layout changes memory only if documents are computed one by one, so that
    # other layouts share one prediction.
    predictions: dict[bool, LargestSize] = {}
    for layout in ("packed", "padded") if is_known else ("padded",):
        changed = config.model_copy(update={**changes, "layout": layout})
        one_by_one = is_varlen and layout == "packed"
        if one_by_one not in predictions:
            predictions[one_by_one] = predictor.largest_size(changed)
        largest = predictions[one_by_one]
        contents = predictor.contents(changed)
        non_padding_tokens = None
        if largest.micro_batch_size is not None and not contents.assumed:
            non_padding_tokens = (
                largest.micro_batch_size * contents.mean_non_padding_tokens
            )
        yield {
            "model": config.model.name,
            **settings,
            "attention": settings["attention"] if is_known else "row",
            "layout": layout,
            "micro_batch_size": largest.micro_batch_size,
            "non_padding_tokens": non_padding_tokens,
            "note": largest.note,
        }


def _is_known(config: TrainConfig) -> bool:
    """Return whether the model's family has this project's attention."""
    return config.model.config["model_type"] in FAMILIES
