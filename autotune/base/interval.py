"""A value with its confidence bounds."""

from dataclasses import dataclass

from pydantic import PositiveFloat

from trainer.formats.tables import StrictTable

CONFIDENCE = 0.98
"""Confidence of bounds by which the program decides. It is high, as a decision that is
checked after every round may be wrong by chance each time."""
SHOWN_CONFIDENCE = 0.95
"""Confidence of bounds that only show the noise of a figure."""
NOT_ENOUGH = "not enough windows"
"""Text shown instead of bounds that would be meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its confidence bounds; both are None if there are none."""

    value: float
    low: float | None = None
    """Lower bound; None if there are too few measurements for bounds."""
    high: float | None = None
    """Upper bound; None if there are too few measurements for bounds."""
    confidence: float | None = None
    """Confidence of the bounds, 0 to 1; None without bounds, and for bounds that rest
    on assumptions."""

    @classmethod
    def from_bounds(
        cls,
        value: float,
        low: float | None,
        high: float | None,
        confidence: float | None,
    ) -> "Interval":
        """Return a value with its bounds, or alone unless both bounds are known."""
        if low is None or high is None:
            return cls(value=value)
        return cls(value=value, low=low, high=high, confidence=confidence)

    def scaled(self, factor: float) -> "Interval":
        """Return the value and its bounds multiplied by a positive factor."""
        low = None if self.low is None else factor * self.low
        high = None if self.high is None else factor * self.high
        return Interval(
            value=factor * self.value, low=low, high=high, confidence=self.confidence
        )


class RatioBounds(StrictTable):
    """Bounds of a ratio at 98 % confidence; None if too few windows show a spread."""

    ratio_low: PositiveFloat | None = None
    """Lower bound of the ratio."""
    ratio_high: PositiveFloat | None = None
    """Upper bound of the ratio."""

    def bounded(self, ratio: float) -> Interval:
        """Return a ratio with these bounds, which must be its own."""
        return Interval.from_bounds(ratio, self.ratio_low, self.ratio_high, CONFIDENCE)
