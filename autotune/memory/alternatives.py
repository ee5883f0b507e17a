"""Alternative settings of a model, each with its predicted largest micro-batch."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.memory.predictor import LargestSize, Predictor
from trainer.config.train_config import TrainConfig
from trainer.model.families import FAMILIES
from trainer.record.progress import Update

_SETTINGS = ("precision", "attention", "activation_checkpointing", "mlm_head")
"""Settings that are combined, in the order of their values in ``_combinations``."""


def alternatives(predictor: Predictor, update: Update) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of every model, each with its largest micro-batch.

    They are all combinations of settings, in each layout. An alternative has the keys
    of ``Answer.what_if``.
    """
    combinations = [
        (config, settings)
        for config in predictor.request.configs
        for settings in _combinations(config)
    ]
    for number, (config, settings) in enumerate(combinations):
        setting_words = " ".join(settings.values())
        update(
            number,
            len(combinations),
            f"alternatives: {config.model.name} {setting_words}",
        )
        yield from _by_layout(predictor, config, settings)


def _combinations(config: TrainConfig) -> Iterator[dict[str, str]]:
    """Yield the combinations of settings that a model can train with."""
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
        # The varlen kernel computes in 16 bits only.
        if settings["precision"] == "fp32" and settings["attention"] == "varlen":
            continue
        yield settings


def _by_layout(
    predictor: Predictor, config: TrainConfig, settings: Mapping[str, str]
) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of one combination of settings, one for each layout."""
    # An encoder that this project does not know cannot be packed, and its own attention
    # is called "row".
    attention = "row"
    layouts: tuple[str, ...] = ("padded",)
    if _is_known(config):
        attention = settings["attention"]
        layouts = ("packed", "padded")
    is_varlen = settings["attention"] == "varlen"
    changes: dict[str, object] = {**settings}
    if is_varlen:
        # The varlen kernel has no dropout.
        changes["attention_dropout"] = 0.0
    # The layout changes memory only if the documents of a packed sequence are computed
    # one by one; all other layouts share one prediction.
    largest_by_separation: dict[bool, LargestSize] = {}
    for layout in layouts:
        changed = config.model_copy(update={**changes, "layout": layout})
        separates_documents = is_varlen and layout == "packed"
        if separates_documents not in largest_by_separation:
            largest_by_separation[separates_documents] = predictor.largest_size(changed)
        largest = largest_by_separation[separates_documents]
        contents = predictor.contents(changed)
        non_padding_tokens = None
        if largest.micro_batch_size is not None and not contents.assumed:
            non_padding_tokens = (
                largest.micro_batch_size * contents.mean_non_padding_tokens
            )
        yield {
            "model": config.model.name,
            **settings,
            "attention": attention,
            "layout": layout,
            "micro_batch_size": largest.micro_batch_size,
            "non_padding_tokens": non_padding_tokens,
            "note": largest.note,
        }


def _is_known(config: TrainConfig) -> bool:
    """Return whether the model's family has this project's attention."""
    return config.model.config["model_type"] in FAMILIES
