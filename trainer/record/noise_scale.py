"""Gradient noise scale, from the gradients of a step and of a part of it. No torch."""

import math

_SMOOTHING = 0.9
"""Weight of the old value in each update. A single estimate is noisy, and the ratio of
two noisy values is biased."""


class NoiseScale:
    """Estimates the batch size above which larger batches hardly help.

    The expected squared norm of a mean gradient over B tokens is G² + S / B: that of
    the true gradient, plus noise. Two batch sizes give G² and S (McCandlish et al.
    2018, appendix A.1): here, the batch of one rank or one micro-batch, and that of the
    whole step. The noise scale S / G² is the batch size at which signal and noise are
    equal. It ignores how the optimizer scales coordinates, so it indicates only the
    order of magnitude. G² and S are smoothed separately.
    """

    def __init__(self) -> None:
        self.signal_and_noise = [0.0, 0.0]
        """Smoothed G² and S, in this order; checkpoints store them as a list."""

    def update(
        self,
        *,
        whole_square: float,
        part_square: float,
        part_share: float,
        tokens: float,
    ) -> None:
        """Add an estimate from the gradients of a step and of a part of it.

        Args:
            whole_square: Squared norm of the step's mean gradient.
            part_square: Squared norm of the part's mean gradient.
            part_share: Share of the step's tokens in the part, between 0 and 1.
            tokens: Tokens of the step.
        """
        if not (math.isfinite(whole_square) and math.isfinite(part_square)):
            return  # a skipped step
        signal = (whole_square - part_share * part_square) / (1 - part_share)
        noise = (part_square - whole_square) * tokens * part_share / (1 - part_share)
        # Both start at zero, and are too small at first by the same factor, which
        # cancels in their ratio.
        old_signal, old_noise = self.signal_and_noise
        self.signal_and_noise = [
            _smooth(old_signal, signal),
            _smooth(old_noise, noise),
        ]

    @property
    def tokens(self) -> float | None:
        """Noise scale in tokens; None if unknown, or if noise hides the signal."""
        signal, noise = self.signal_and_noise
        if signal <= 0 or noise <= 0:
            return None
        return noise / signal


def _smooth(old: float, new: float) -> float:
    return _SMOOTHING * old + (1 - _SMOOTHING) * new
