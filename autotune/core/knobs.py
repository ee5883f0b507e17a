"""The settings of a step that are explored together: none of them changes what is learned, but rounding may differ."""

from dataclasses import dataclass, fields
from typing import Any

from trainer.config import Attention, Checkpointing, Layout, Precision, TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One cell of the space. Fields are the trainer's own settings."""

    precision: Precision
    attention: Attention
    checkpointing: Checkpointing
    compile_layers: bool
    layout: Layout
    micro_batch_rows: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Knobs":
        """Those of a configuration."""
        return cls(**{name: getattr(config, name) for name in KNOBS})

    def settings(self) -> dict[str, Any]:
        """By their names in the trainer's configuration."""
        return {name: getattr(self, name) for name in KNOBS}

    @property
    def name(self) -> str:
        """In a few words, for people."""
        words = [f"{self.micro_batch_rows} {self.layout} rows", self.precision]
        words += [] if self.attention == "auto" else [self.attention]
        words += [] if self.checkpointing == "none" else [f"{self.checkpointing} checkpointing"]
        words += ["compiled"] if self.compile_layers else []
        return ", ".join(words)


KNOBS = tuple(field.name for field in fields(Knobs))
"""Their names."""
EQUAL_TO_THE_BIT_OR_ORDER = frozenset(KNOBS) - {"precision"}
"""Knobs that tests hold to the same mathematics; the others are asked for the same loss."""
