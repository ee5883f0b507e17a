"""Other trainers on the model and dataset of the bundled one, as subjects."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import PositiveFloat, PositiveInt

from autotune.subjects.subject import (
    Argument,
    Call,
    Identity,
    Setting,
    Size,
    code_identity,
)
from trainer.formats.manifest import SpecialIds
from trainer.formats.tables import StrictTable, parse_table
from trainer.formats.train_config import TrainConfig

OtherTrainer = Literal["hf-trainer", "paper"]
"""Name of another trainer."""
WORDS: Mapping[OtherTrainer, str] = {
    "hf-trainer": "transformers' Trainer with its defaults",
    "paper": "the paper's trainer, written from its public source",
}
"""The trainers in words."""
_JOBS: Mapping[OtherTrainer, str] = {
    "hf-trainer": "autotune.subjects.mlm.jobs.hf_trainer",
    "paper": "autotune.subjects.mlm.jobs.paper_trainer",
}
"""Modules of their functions."""


class OtherTrainerSubject(StrictTable):
    """Another trainer, which trains the same model on the same dataset."""

    kind: ClassVar[str] = "mlm-baseline"

    trainer: OtherTrainer
    """The trainer."""
    config: TrainConfig
    """Settings of the bundled trainer. Its model, dataset, sequence length, device,
    masking, learning rate and seed are those of the other one, too."""
    vocab_size: PositiveInt
    """Tokens of the vocabulary."""
    special_ids: SpecialIds
    """Ids of special tokens in the vocabulary."""
    tokens_per_sample: PositiveFloat
    """Average tokens of a sample, without padding, by which samples are counted."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches of an optimizer step on each rank."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the subject that ``table`` describes."""
        return parse_table(cls, dict(table), where="[subject]")

    def table(self) -> dict[str, Any]:
        """Return all fields."""
        return self.model_dump(mode="json")

    @property
    def name(self) -> str:
        """Name of the trainer and of the model."""
        return f"{self.trainer}-{self.config.model.name}"

    @property
    def words(self) -> str:
        """The trainer and the model in words."""
        return f"{WORDS[self.trainer]}: {self.config.model.name}"

    @property
    def size(self) -> Size:
        """Samples of a micro-batch."""
        return Size(noun="sample", unit="tokens", units_per_size=self.tokens_per_sample)

    def code(self) -> dict[str, str]:
        """Return nothing: the source is this project's."""
        return {}

    def identity(self, sources: Mapping[str, str]) -> Identity:
        """Return the hash of the trainer's function and its arguments."""
        return code_identity(self, sources)

    def settings(self) -> tuple[Setting, ...]:
        """Return nothing: it is not tuned here."""
        return ()

    def step(self, choice: Mapping[str, Argument]) -> Call:
        """Return the trainer's step on random samples of the full length."""
        return self._call("build_step", choice)

    def window_step(self, choice: Mapping[str, Argument]) -> Call:
        """Return the trainer's step for batches of its loader."""
        return self._call("build_window_step", choice)

    def loader(self, choice: Mapping[str, Argument]) -> Call:
        """Return the trainer's loader of the dataset."""
        return self._call("build_loader", choice)

    def training(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return transformers' training loop; None for a trainer without one here."""
        if self.trainer == "hf-trainer":
            return self._call("build_training", choice)
        return None

    def untuned(self) -> Call | None:
        """Return nothing: it has its own defaults."""
        return None

    def model(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return nothing: its memory is not predicted."""
        return None

    def apply(self, choice: Mapping[str, Argument]) -> dict[str, Any]:
        """Return the choice."""
        return dict(choice)

    def _call(self, function: str, choice: Mapping[str, Argument]) -> Call:
        return Call(
            function=f"{_JOBS[self.trainer]}:{function}",
            arguments={
                **self.model_dump(
                    mode="json", exclude={"trainer", "tokens_per_sample"}
                ),
                **choice,
            },
        )
