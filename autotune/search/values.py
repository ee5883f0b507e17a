"""The evidence of an exploration, as a table of the profile."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from autotune.base.interval import (
    Interval,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    RatioBounds,
)
from trainer.config.tables import StrictTable
from trainer.config.train_config import Attention, Checkpointing, Layout, Precision, TrainConfig


class Configuration(StrictTable):
    """Settings of a step that are explored together, named as in the trainer's configuration.

    None changes what is learned, but rounding may differ.
    """

    precision: Precision
    attention: Attention
    activation_checkpointing: Checkpointing
    compile: bool
    layout: Layout
    micro_batch_size: Positive

    @classmethod
    def of(cls, config: TrainConfig | Mapping[str, Any]) -> "Configuration":
        """Return those of a training configuration."""
        plain = config.model_dump() if isinstance(config, TrainConfig) else config
        return cls.model_validate({name: plain[name] for name in KNOBS})

    def but(self, **settings: object) -> "Configuration":
        """Return a configuration with other settings."""
        return self.model_copy(update=settings)

    @property
    def kind(self) -> "Configuration":
        """The same for all micro-batches."""
        return self.but(micro_batch_size=1)

    @property
    def name(self) -> str:
        """In a few words."""
        words = [f"{self.micro_batch_size} {self.layout} rows", self.precision, self.attention]
        words += [f"{self.activation_checkpointing} checkpointing", "compiled" if self.compile else ""]
        return ", ".join(word for word in words if word not in ("auto", "none checkpointing", ""))


KNOBS = tuple(Configuration.model_fields)
EXACT_KNOBS = frozenset(KNOBS) - {"precision"}
"""Configuration that tests hold to the same mathematics; the others must reach the same loss."""


class ExploredRow(StrictTable):
    """What was tried, and what it gave."""

    settings: Configuration
    windows: NonNegative
    """Full and short ones."""
    tokens_per_s: PositiveFloat | None = None
    """Median; None where it did not run."""
    ratio_to_starting: PositiveFloat | None = None
    """To the unexplored settings, read in the same round: median of its full windows, of short ones where there is no
    full one. None of the unexplored settings themselves, and where nothing ran."""
    outcome: str
    """``ran``, ``pruned`` after a short window, or why it did not run."""


class ExploreEvidence(RatioBounds):
    """What a search over the settings of the step found."""

    cells: Positive
    """Of the space, in which every cell is a way to train that fits, as far as memory is predicted."""
    trials: NonNegative
    """Different cells that were tried, those that did not run included."""
    windows: NonNegative
    pruned: NonNegative
    """Cells that one short window was enough for."""
    starting: Configuration
    chosen: Configuration
    """The same as ``starting`` where nothing was proven to be faster."""
    candidate: Configuration
    """What promised most, and was held against the unexplored settings."""
    ratio_to_starting: PositiveFloat
    """Real tokens/s of the candidate, windows of the same rounds against each other."""
    adopted: bool

    @property
    def ratio(self) -> Interval:
        """The ratio to the unexplored settings with its bounds."""
        return self.bounded(self.ratio_to_starting)

    choice: str
    """Why the settings are what they are."""
    stopped_because: str
    equal_loss: str | None = None
    """What a check of the loss found where rounding differs: of the chosen settings, or of faster ones that are not
    taken for it. None where there was nothing to check."""
    left_out: list[str] = Field(default_factory=list)
    """Configuration and values that were not explored, and why."""
    rows: list[ExploredRow]
    seconds: NonNegativeFloat
