"""Evidence of a comparison of tuned settings with others."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.evidence.gpu_use import Share
from trainer.formats.tables import StrictTable

SettingValue = str | int | float | bool | None
"""Value of a setting; None if it is not set."""
TUNED = "tuned"
"""Name of the row with the settings of the profile."""
UNTUNED = "untuned"
"""Name of the row with the subject's own settings before tuning."""
BASELINE_WORDS = {
    UNTUNED: "untuned settings",
    "padded": "static padding",
    "hf-trainer": "HF Trainer",
    "paper": "the paper's trainer",
}
"""Baselines in words, by the names of their rows; the names of other rows are those of
profiles."""


class SettingDifference(StrictTable):
    """A setting in which a baseline differs from the tuned settings, or was forced.

    A setting is forced if the machine or the model does not allow the baseline's own
    value; it may then be equal to the tuned one.
    """

    key: str
    """Dotted name of the setting, such as ``data.num_workers``."""
    theirs: SettingValue = None
    """Value in the baseline; None if it is unset."""
    tuned: SettingValue = None
    """Value in the tuned settings; None if it is unset."""
    reason: str | None = None
    """Reason for the baseline's value, if it is not its own choice; None otherwise."""


class BaselineRow(StrictTable):
    """Measurements of one subject with its settings."""

    name: str
    """Name of the row: ``tuned``, a baseline, or another profile."""
    subject: str
    """The measured subject in words, with its kind."""
    differences: list[SettingDifference] = Field(default_factory=list)
    """Differences from the tuned settings that affect speed."""
    units_per_s: list[PositiveFloat]
    """Units/s of each window, of all local ranks, without padding if the subject counts
    it; empty if it did not run."""
    speedup: PositiveFloat | None = None
    """Tuned units/s over the row's, in windows of the same round; None if it did not
    run."""
    speedup_low: PositiveFloat | None = None
    """Lower 95 % confidence bound of the speedup; None for the tuned settings, or with
    too few windows."""
    speedup_high: PositiveFloat | None = None
    """Upper 95 % confidence bound of the speedup; None if there is no lower one."""
    data_wait_share: Share | None = None
    """Median over windows of the share of time spent waiting for data; None if the
    subject did not run."""
    outcome: str
    """``ran``, or the reason why it did not run."""

    @property
    def words(self) -> str:
        """The row in words, for sentences."""
        return BASELINE_WORDS.get(self.name, self.name)

    @property
    def bounded_speedup(self) -> Interval | None:
        """Speedup with its bounds; None if the subject did not run."""
        if self.speedup is None:
            return None
        return Interval.from_bounds(
            self.speedup, self.speedup_low, self.speedup_high, SHOWN_CONFIDENCE
        )


class BaselineEvidence(StrictTable):
    """Comparison of the tuned settings with others, in interleaved windows."""

    rows: list[BaselineRow]
    """Contenders, the tuned settings last."""
    unit: str
    """Unit of ``units_per_s``, as a plural: ``tokens``, ``samples``."""
    counted_by_size: bool = False
    """True if units of your own code were counted by its size, padding included."""
    local_ranks: PositiveInt
    """GPUs per node; on a CPU, processes."""
    window_s: PositiveFloat
    """Shortest duration of a window."""
    windows: PositiveInt
    """Number of windows of all rows."""
    seconds: NonNegativeFloat
    """Seconds that all trials of the comparison took, checks of fit included."""


def row_of(baseline: BaselineEvidence | None, name: str) -> BaselineRow | None:
    """Return the row of a name; None if it was not compared."""
    if baseline is None:
        return None
    for row in baseline.rows:
        if row.name == name:
            return row
    return None
