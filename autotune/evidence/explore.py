"""Evidence of a joint search over the settings of a training step."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from autotune.base.interval import Interval, RatioBounds
from autotune.evidence.argument import Argument
from trainer.formats.tables import StrictTable


class ExploredConfiguration(StrictTable):
    """Settings of a training step that were searched together."""

    name: str
    """The configuration in words."""
    settings: dict[str, Argument]
    """Value of each setting by its name in the subject, the searched size included."""


class ExploredRow(ExploredConfiguration):
    """Configuration that was tried, and its result."""

    windows: NonNegativeInt
    """Number of full and short windows."""
    tokens_per_s: PositiveFloat | None = None
    """Median non-padding tokens/s, or the subject's units/s; None if it did not run."""
    ratio_to_starting: PositiveFloat | None = None
    """Median ratio to the starting configuration in the same round, of full windows, or
    of short ones if there are no full ones. None for the starting configuration itself,
    and if nothing ran."""
    predicted_ratio: PositiveFloat | None = None
    """The same, as predicted from traces of both steps; None without a trace or
    constants of the machine."""
    outcome: str
    """``ran``, ``pruned`` after a short window, or the reason why it did not run."""


class ExploreEvidence(RatioBounds):
    """Result of a search over the settings of a training step."""

    configurations: PositiveInt
    """Number of configurations in the search space, without those predicted not to
    fit."""
    trials: NonNegativeInt
    """Number of configurations that were tried, including those that did not run."""
    windows: NonNegativeInt
    pruned: NonNegativeInt
    """Number of configurations that were rejected after one short window."""
    starting: ExploredConfiguration
    chosen: ExploredConfiguration
    """Configuration to train with; equals ``starting`` if none was verified to be
    faster."""
    candidate: ExploredConfiguration
    """Most promising configuration, which was compared with the starting
    configuration."""
    ratio_to_starting: PositiveFloat
    """Non-padding tokens/s of the candidate over the starting configuration's, in
    windows of the same rounds."""
    adopted: bool
    choice: str
    """Reason for the chosen settings."""
    stopped_because: str
    equal_loss: str | None = None
    """Result of the loss check if rounding differs: of the chosen settings, or of
    faster ones that it rejected. None if there was nothing to check."""
    left_out: list[str] = Field(default_factory=list)
    """Settings and values that were not searched, and why."""
    rows: list[ExploredRow]
    seconds: NonNegativeFloat

    @property
    def ratio(self) -> Interval:
        """Ratio to the starting configuration, with its bounds."""
        return self.bounded(self.ratio_to_starting)

    @property
    def candidate_row(self) -> ExploredRow | None:
        """Result of the candidate; None if it was not tried."""
        for row in self.rows:
            if row.settings == self.candidate.settings:
                return row
        return None
