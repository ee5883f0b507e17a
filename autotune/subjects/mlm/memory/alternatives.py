"""Alternative settings of a model, each with its predicted largest micro-batch."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from autotune.subjects.mlm.memory.predictor import LargestSize, Predictor
from autotune.subjects.mlm.memory.values import Alternative
from trainer.formats.families import FAMILIES
from trainer.formats.progress import Update
from trainer.formats.train_config import TrainConfig

_OWN_ATTENTION = "row"
"""Name of the own attention of an encoder that this project does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    """Combination of settings; its fields have the names that ``TrainConfig`` uses."""

    precision: str
    attention: str
    activation_checkpointing: str
    mlm_head: str

    @property
    def words(self) -> str:
        """All values, for progress."""
        return " ".join(
            (
                self.precision,
                self.attention,
                self.activation_checkpointing,
                self.mlm_head,
            )
        )


def alternatives(predictor: Predictor, update: Update) -> Iterator[Alternative]:
    """Yield the alternatives of every model, each with its largest micro-batch.

    They are all combinations of settings, in each layout.
    """
    combinations = [
        (config, settings)
        for config in predictor.request.configs
        for settings in _combinations(config)
    ]
    for number, (config, settings) in enumerate(combinations):
        update(
            number,
            len(combinations),
            f"alternatives: {config.model.name} {settings.words}",
        )
        yield from _by_layout(predictor, config, settings)


def _combinations(config: TrainConfig) -> Iterator[_Settings]:
    """Yield the combinations of settings that a model can train with."""
    attentions: tuple[str, ...] = ("sdpa",)
    if not _is_known(config):
        attentions = ("auto",)
    elif config.device == "cuda":
        attentions = ("varlen", "sdpa")
    for precision, attention, checkpointing, head in itertools.product(
        ("bf16", "fp32"),
        attentions,
        ("none", "selective", "full"),
        ("sparse", "dense"),
    ):
        # The varlen kernel computes in 16 bits only.
        if precision == "fp32" and attention == "varlen":
            continue
        yield _Settings(
            precision=precision,
            attention=attention,
            activation_checkpointing=checkpointing,
            mlm_head=head,
        )


def _by_layout(
    predictor: Predictor, config: TrainConfig, settings: _Settings
) -> Iterator[Alternative]:
    """Yield the alternatives of one combination of settings, one for each layout."""
    changed = config.model_copy(update=asdict(settings))
    is_varlen = settings.attention == "varlen"
    if is_varlen:
        # The varlen kernel has no dropout.
        changed = changed.model_copy(update={"attention_dropout": 0.0})
    if not _is_known(config):
        # An encoder that this project does not know cannot be packed.
        padded = changed.model_copy(update={"layout": "padded"})
        largest = predictor.largest_size(padded)
        yield _alternative(predictor, padded, _OWN_ATTENTION, largest)
        return
    packed = changed.model_copy(update={"layout": "packed"})
    padded = changed.model_copy(update={"layout": "padded"})
    largest = predictor.largest_size(packed)
    yield _alternative(predictor, packed, settings.attention, largest)
    # The layout changes memory only if the documents of a packed sequence are computed
    # one by one, as varlen does; otherwise both layouts share one prediction.
    if is_varlen:
        largest = predictor.largest_size(padded)
    yield _alternative(predictor, padded, settings.attention, largest)


def _alternative(
    predictor: Predictor, config: TrainConfig, attention: str, largest: LargestSize
) -> Alternative:
    """Return the alternative of some settings, of which the largest size is known."""
    contents = predictor.contents(config)
    non_padding_tokens = None
    if largest.micro_batch_size is not None and not contents.assumed:
        non_padding_tokens = largest.micro_batch_size * contents.mean_non_padding_tokens
    return Alternative(
        model=config.model.name,
        precision=config.precision,
        attention=attention,
        activation_checkpointing=config.activation_checkpointing,
        mlm_head=config.mlm_head,
        layout=config.layout,
        micro_batch_size=largest.micro_batch_size,
        non_padding_tokens=non_padding_tokens,
        note=largest.note,
    )


def _is_known(config: TrainConfig) -> bool:
    """Return whether the model's family has this project's attention."""
    return config.model.config["model_type"] in FAMILIES
