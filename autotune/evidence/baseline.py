"""Evidence of a comparison with baselines."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.evidence.gpu_use import Share
from trainer.formats.tables import StrictTable

SettingValue = str | int | float | bool | None
"""Value of a setting of the trainer; None if it is not set."""
RecipeName = Literal["paper", "hf-trainer", "tuned"]
"""Name of a configuration in the comparison: the two baselines and the tuned one."""


class SettingDifference(StrictTable):
    """A setting in which a recipe differs from the tuned settings, or was forced.

    A setting is forced if the machine or the model does not allow the recipe's own
    value; it may then be equal to the tuned one.
    """

    key: str
    """Dotted name of the setting, without ``train``, such as ``data.num_workers``."""
    theirs: SettingValue = None
    """Value in the recipe; None if it is unset."""
    tuned: SettingValue = None
    """Value in the tuned settings; None if it is unset."""
    reason: str | None = None
    """Reason for the recipe's value if it was forced."""


class RecipeRow(StrictTable):
    """Measurements of one recipe with the same model, data and trainer."""

    name: RecipeName
    """Name of the recipe."""
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
    """Upper 95 % confidence bound of the speedup; None if there is no lower one."""
    data_wait_share: Share | None = None
    """Median over windows of the share of time spent waiting for data; None if the
    recipe did not run."""
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
    """Recipes, the tuned one last."""
    local_ranks: PositiveInt
    """GPUs per node; on a CPU, processes."""
    window_s: PositiveFloat
    """Shortest duration of a window."""
    windows: PositiveInt
    """Number of windows of all recipes."""
    seconds: NonNegativeFloat
    """Seconds that all trials of the comparison took, checks of fit included."""


def row_of(baseline: BaselineEvidence | None, name: RecipeName) -> RecipeRow | None:
    """Return the row of a recipe; None if it was not compared."""
    if baseline is None:
        return None
    for row in baseline.rows:
        if row.name == name:
            return row
    return None
