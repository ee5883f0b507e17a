"""Check that two settings differ in rounding only and learn the same.

Pure: it compares the losses of two runs from one start, on the same data.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOSS_STEPS = 48
"""Steps of each run of the check."""
EQUAL_LOSS_SHARE = 0.01
"""Largest relative difference of two losses at the end of the check that count as
equal."""
CHECK_WARM_UP_STEPS = 8
"""Warm-up steps of the check, instead of the recipe's: weights that hardly move show
nothing."""
LEAST_FALL_SHARE = 0.02
"""Relative fall of the loss in the check, below which equal losses mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossVerdict:
    """Result of a check."""

    equal: bool
    """True if the losses are equal; False also if that could not be checked."""
    message: str
    """Losses and their difference, or the reason why they were not compared."""


def fell_too_little(losses: Sequence[float], name: str) -> LossVerdict | None:
    """Return the verdict if the loss of the reference fell too little.

    Args:
        losses: Loss of each step of the reference.
        name: Name of its setting.

    Returns:
        The verdict "not checked", or None if the loss fell far enough.
    """
    final_loss = _final_loss(losses)
    if final_loss < (1 - LEAST_FALL_SHARE) * losses[0]:
        return None
    fall = f"from {losses[0]:.4f} to {final_loss:.4f} in {len(losses)} steps"
    message = (
        f"not checked: with {name} the loss went {fall}, too little to show a"
        " difference"
    )
    return LossVerdict(equal=False, message=message)


def compare_losses(
    reference: Sequence[float], other: Sequence[float], names: tuple[str, str]
) -> LossVerdict:
    """Compare the losses of the last quarter of the steps.

    Args:
        reference: Loss of each step with the first setting.
        other: Loss of each step with the second setting.
        names: Names of the two settings.
    """
    reference_name, other_name = names
    reference_loss = _final_loss(reference)
    other_loss = _final_loss(other)
    difference_share = abs(other_loss / reference_loss - 1)
    equal = difference_share <= EQUAL_LOSS_SHARE
    within = "within" if equal else "not within"
    message = (
        f"after {len(reference)} steps the loss was {other_loss:.4f} with {other_name}"
        f" and {reference_loss:.4f} with {reference_name}: {difference_share:.2%}"
        f" apart, {within} {EQUAL_LOSS_SHARE:.0%}"
    )
    return LossVerdict(equal=equal, message=message)


def _final_loss(losses: Sequence[float]) -> float:
    """Return the mean loss of the last quarter of the steps."""
    steps = max(1, len(losses) // 4)
    return statistics.fmean(losses[-steps:])
