"""The bundled trainer as a subject."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import PositiveFloat, PositiveInt

from autotune.evidence.profile import model_sha256
from autotune.subjects.mlm.settings import ROUNDING_SETTINGS, TRIED_VALUES
from autotune.subjects.subject import Argument, Call, Identity, Setting, Size
from autotune.workers.decide.window_time import MOST_MICRO_BATCHES
from trainer.formats.manifest import Manifest, SpecialIds, read_manifest
from trainer.formats.tables import StrictTable, parse_table
from trainer.formats.train_config import TrainConfig

_JOBS = "autotune.subjects.mlm.jobs"


class MlmSubject(StrictTable):
    """The trainer with some settings, and what its dataset adds to them."""

    kind: ClassVar[str] = "mlm"

    config: TrainConfig
    """Settings of the trainer. A choice replaces some of them."""
    vocab_size: PositiveInt
    """Tokens of the vocabulary."""
    special_ids: SpecialIds
    """Ids of special tokens in the vocabulary."""
    documents_per_sequence: PositiveFloat = 1.0
    """Documents in each sequence of the fullest micro-batches, on average."""
    local_ranks: PositiveInt = 1
    """Ranks of this node, which train together."""
    dataset_hash: str = ""
    """Hash of the dataset; empty if none is known."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Self:
        """Return the subject that ``table`` describes.

        ``data``, the directory of a dataset, takes the place of what it adds.
        """
        fields = dict(table)
        data = fields.pop("data", None)
        if data is not None:
            fields |= _facts_of(read_manifest(Path(data)))
        return parse_table(cls, fields, where="[subject]")

    @classmethod
    def of_dataset(cls, config: TrainConfig, manifest: Manifest, **more: Any) -> Self:
        """Return the trainer on a dataset.

        Args:
            config: Settings of the trainer.
            manifest: Manifest of the dataset.
            more: Further fields.
        """
        return cls(config=config, **_facts_of(manifest), **more)

    def table(self) -> dict[str, Any]:
        """Return all settings, and what the dataset adds."""
        return self.model_dump(mode="json")

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.config.model.name

    @property
    def words(self) -> str:
        """Name of the model."""
        return self.config.model.name

    @property
    def size(self) -> Size:
        """Sequences of a micro-batch."""
        return Size(
            noun="sequence",
            unit="tokens",
            units_per_size=float(self.config.seq_length_tokens),
        )

    def code(self) -> dict[str, str]:
        """Return nothing: the source is this project's."""
        return {}

    def identity(self, sources: Mapping[str, str]) -> Identity:
        """Return the hashes of the model and of the dataset."""
        return Identity(
            model_sha256=model_sha256(self.config.model),
            dataset_hash=self.dataset_hash,
        )

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings that leave the recipe unchanged, with all their values.

        Which of them a machine, the model and your request allow is decided in
        ``autotune.subjects.mlm.search``.
        """
        return tuple(
            Setting(
                name=name, values=values, changes_rounding=name in ROUNDING_SETTINGS
            )
            for name, values in TRIED_VALUES.items()
        )

    def step(self, choice: Mapping[str, Argument]) -> Call:
        """Return the trainer's step on random, full sequences.

        ``choice`` may have ``micro_batches``: micro-batches of each rank in an
        optimizer step, which sets the global batch.
        """
        return Call(
            function=f"{_JOBS}.step:build_step", arguments=self._arguments(choice)
        )

    def window_step(self, choice: Mapping[str, Argument]) -> Call:
        """Return the trainer's step for micro-batches of its loader.

        ``choice`` may have ``most_micro_batches``: limit of micro-batches in a step.
        """
        return Call(
            function=f"{_JOBS}.window_step:build_step",
            arguments=self._window_arguments(choice),
        )

    def loader(self, choice: Mapping[str, Argument]) -> Call:
        """Return the trainer's loader of its dataset.

        ``choice`` may have ``most_micro_batches``, as for ``window_step``.
        """
        arguments = self._window_arguments(choice)
        data = self.chosen(choice).data
        return Call(
            function=f"{_JOBS}.loader:build_loader",
            arguments={
                **arguments,
                "num_workers": data.num_workers,
                "prefetch_factor": data.prefetch_factor,
                "pin_memory": data.pin_memory,
            },
        )

    def training(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return nothing: its own command trains."""
        return None

    def untuned(self) -> Call | None:
        """Return nothing: ``baselines`` has the untuned settings as recipes."""
        return None

    def model(self, choice: Mapping[str, Argument]) -> Call | None:
        """Return nothing: the trainer's whole step is traced, by another job."""
        return None

    def apply(self, choice: Mapping[str, Argument]) -> dict[str, Any]:
        """Return the settings of ``[train]`` with this choice."""
        return self.chosen(choice).model_dump(mode="json")

    def chosen(self, choice: Mapping[str, Argument]) -> TrainConfig:
        """Return the trainer's settings with a choice of them replaced.

        Keys are dotted, as in ``--set train.data.num_workers=2``. The key
        ``micro_batches`` is none of the trainer's: it sets the global batch.
        ``most_micro_batches`` is of windows alone.
        """
        changes = dict(choice)
        micro_batches = changes.pop("micro_batches", None)
        changes.pop("most_micro_batches", None)
        config = self.config
        for key, value in changes.items():
            table, _, name = key.rpartition(".")
            if table:
                nested = getattr(config, table).model_copy(update={name: value})
                config = config.model_copy(update={table: nested})
            else:
                config = config.model_copy(update={name: value})
        if micro_batches is None:
            return config
        sequences = config.micro_batch_size * self.local_ranks * int(micro_batches)
        return config.model_copy(update={"global_batch_size": sequences})

    def _window_arguments(self, choice: Mapping[str, Argument]) -> dict[str, Any]:
        """Return the arguments of both functions of a window."""
        return {
            "config": self.chosen(choice).model_dump(mode="json"),
            "most_micro_batches": choice.get("most_micro_batches", MOST_MICRO_BATCHES),
        }

    def _arguments(self, choice: Mapping[str, Argument]) -> dict[str, Any]:
        return {
            "config": self.chosen(choice).model_dump(mode="json"),
            "vocab_size": self.vocab_size,
            "special_ids": self.special_ids.model_dump(mode="json"),
            "documents_per_sequence": self.documents_per_sequence,
        }


def _facts_of(manifest: Manifest) -> dict[str, Any]:
    """Return what a dataset adds to the trainer."""
    return {
        "vocab_size": manifest.vocab_size,
        "special_ids": manifest.special_ids,
        "dataset_hash": manifest.dataset_hash,
    }
