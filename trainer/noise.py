"""The gradient noise scale: from which batch size on a larger one hardly gives a better gradient. Pure.

The squared norm of a mean gradient over B tokens is expected to be G² + S / B: that of the true gradient, and noise.
Two batch sizes give both (McCandlish et al. 2018, appendix A.1); here the batch of one rank, or of one micro-batch, and
that of the whole step. Their ratio S / G² is the batch in which both are equal. Left out: how the optimizer scales
coordinates, so it is a sign of the order of magnitude.
"""

import math
from collections.abc import Sequence

SMOOTHING = 0.9
"""Of what was known before, in each update: single estimates are noisy, and their ratio is biased."""


class NoiseScale:
    """Smooths both parts separately, as their ratio would be biased."""

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = 0.0

    def update(self, whole_square: float, part_square: float, part_share: float, tokens: float) -> None:
        """Add an estimate.

        Args:
            whole_square: Squared norm of the mean gradient of all tokens.
            part_square: The same of a part of them, in the mean over parts.
            part_share: How large a part is, between 0 and 1, both excluded.
            tokens: All tokens of the step.
        """
        if not (math.isfinite(whole_square) and math.isfinite(part_square)):
            return  # a step that was left out
        signal = (whole_square - part_share * part_square) / (1 - part_share)
        noise = (part_square - whole_square) * tokens * part_share / (1 - part_share)
        # Both start from nothing and are too small at first by the same factor, which the ratio does not see.
        self._signal = SMOOTHING * self._signal + (1 - SMOOTHING) * signal
        self._noise = SMOOTHING * self._noise + (1 - SMOOTHING) * noise

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None as long as noise hides the signal, or nothing is known."""
        if self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal

    def to_json(self) -> list[float]:
        """Both parts."""
        return [self._signal, self._noise]

    def recall(self, saved: Sequence[float]) -> None:
        """Go on from what ``to_json`` gave."""
        self._signal, self._noise = saved
