"""The evidence of a comparison with other recipes, as a table of the profile."""

from typing import Literal

from pydantic import Field

from autotune.base.interval import SHOWN_CONFIDENCE, Interval, NonNegativeFloat, Positive, PositiveFloat
from autotune.trials.values import Share
from trainer.config.tables import StrictTable

SettingValue = str | int | float | bool | None


RecipeName = Literal["paper", "hf-trainer", "tuned"]


class SettingDifference(StrictTable):
    """A setting in which a recipe differs from the tuned one, or that it could not choose itself."""

    key: str
    """Dotted, without ``train``: ``data.num_workers``."""
    theirs: SettingValue = None
    """None where it is unset."""
    tuned: SettingValue = None
    reason: str | None = None
    """Why it is theirs, where the recipe had no choice."""


class RecipeRow(StrictTable):
    """One way to train the same model on the same data, by the same trainer."""

    name: RecipeName
    differences: list[SettingDifference] = Field(default_factory=list)
    """From the tuned settings, in what bears on speed."""
    tokens_per_s: list[PositiveFloat]
    """One figure per window, of all local ranks; empty where it did not run."""
    speedup: PositiveFloat | None = None
    """Tuned real tokens/s over theirs, of windows of the same round; None where it did not run."""
    speedup_low: PositiveFloat | None = None
    """95 % confidence bounds; None where too few windows show a spread."""
    speedup_high: PositiveFloat | None = None
    data_wait_share: Share | None = None
    outcome: str
    """``ran``, or why it did not."""

    @property
    def bounded_speedup(self) -> Interval | None:
        """The speedup with its bounds; None where it did not run."""
        known = self.speedup
        return None if not known else Interval.of(known, self.speedup_low, self.speedup_high, SHOWN_CONFIDENCE)


class BaselineEvidence(StrictTable):
    """What the tuned settings are worth: the same training as others would set it up."""

    rows: list[RecipeRow]
    local_ranks: Positive
    window_s: PositiveFloat
    windows: Positive
    seconds: NonNegativeFloat


def row_of(baseline: BaselineEvidence | None, name: str) -> RecipeRow | None:
    """One of the ways that were compared; None where it was not."""
    return next((row for row in baseline.rows if row.name == name), None) if baseline else None
