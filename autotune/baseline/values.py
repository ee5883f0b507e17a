"""Evidence of a comparison with other recipes, as a table of the profile."""

from typing import Literal

from pydantic import Field

from autotune.base.interval import (
    SHOWN_CONFIDENCE,
    Interval,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from autotune.trials.job_figures import Share
from trainer.config.tables import StrictTable

SettingValue = str | int | float | bool | None
RecipeName = Literal["paper", "hf-trainer", "tuned"]
"""Name of a configuration in the comparison: the two baselines and the tuned one."""


class SettingDifference(StrictTable):
    """A setting that a recipe has otherwise than the tuned settings, or was forced to.

    It was forced if the machine or the model does not allow the recipe's own value.
    """

    key: str
    """Dotted name of the setting, without ``train``, such as ``data.num_workers``."""
    theirs: SettingValue = None
    """Value in the recipe; None if it is unset."""
    tuned: SettingValue = None
    reason: str | None = None
    """Reason for the recipe's value if it was forced."""


class RecipeRow(StrictTable):
    """Measurements of one recipe with the same model, data and trainer."""

    name: RecipeName
    differences: list[SettingDifference] = Field(default_factory=list)
    """Differences from the tuned settings that affect speed."""
    tokens_per_s: list[PositiveFloat]
    """Non-padding tokens/s of each window, of all local ranks; empty if the recipe did
    not run."""
    speedup: PositiveFloat | None = None
    """Tuned non-padding tokens/s over the recipe's, in windows of the same round; None
    if it did not run."""
    speedup_low: PositiveFloat | None = None
    """Lower 95 % confidence bound of the speedup; None for the tuned settings, or with
    too few windows."""
    speedup_high: PositiveFloat | None = None
    data_wait_share: Share | None = None
    outcome: str
    """``ran``, or the reason why it did not run."""

    @property
    def bounded_speedup(self) -> Interval | None:
        """Speedup with its bounds; None if the recipe did not run."""
        if self.speedup is None:
            return None
        return Interval.from_bounds(
            self.speedup, self.speedup_low, self.speedup_high, SHOWN_CONFIDENCE
        )


class BaselineEvidence(StrictTable):
    """Comparison of the tuned settings with other recipes for the same training."""

    rows: list[RecipeRow]
    local_ranks: Positive
    window_s: PositiveFloat
    windows: Positive
    seconds: NonNegativeFloat


def row_of(baseline: BaselineEvidence | None, name: str) -> RecipeRow | None:
    """Return the row of a recipe; None if it was not compared."""
    if baseline is None:
        return None
    for row in baseline.rows:
        if row.name == name:
            return row
    return None
