"""Check that two settings differ in rounding only and learn the same. Pure.

It compares the losses of two runs, one with each setting, from the same initial weights
on the same data.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.trials.outcomes import Measured, Outcome, describe

LOSS_STEPS = 48
"""Optimizer steps of each run of the check; the last quarter is compared."""
EQUAL_LOSS_SHARE = 0.01
"""Largest relative difference at which two final losses count as equal."""
CHECK_WARM_UP_STEPS = 8
"""Warm-up steps of the check, instead of the recipe's, which may be longer than the
whole check: losses of weights that hardly move are equal with any setting."""
LEAST_FALL_SHARE = 0.02
"""Relative fall of the loss in the check, below which equal losses mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossVerdict:
    """Result of a check."""

    equal: bool
    """True if the losses are equal; False also if that could not be checked."""
    message: str
    """Losses and their difference, or the reason why they were not compared."""


def check_loss(names: tuple[str, str], train: Callable[[str], Outcome]) -> LossVerdict:
    """Train with both settings, and compare the losses.

    The second run is skipped if the loss of the first fell too little to show a
    difference.

    Args:
        names: Names of the settings, the reference first.
        train: Trains with the setting of a name, always from the same initial weights
            on the same data; its figures have the ``losses`` of all steps.
    """
    reference_name, other_name = names
    reference = train(reference_name)
    if not isinstance(reference, Measured):
        return _failed_check(reference_name, reference)
    verdict = fell_too_little(reference.figures["losses"], reference_name)
    if verdict is not None:
        return verdict
    other = train(other_name)
    if not isinstance(other, Measured):
        return _failed_check(other_name, other)
    return compare_losses(reference.figures["losses"], other.figures["losses"], names)


def _failed_check(name: str, outcome: Outcome) -> LossVerdict:
    """Return the verdict if the run with a setting failed."""
    message = f"not checked: the run with {name} failed ({describe(outcome)})"
    return LossVerdict(equal=False, message=message)


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
    """Compare the final losses of two runs.

    Args:
        reference: Loss of each step with the first setting.
        other: Loss of each step with the second setting.
        names: Names of the two settings, in this order.
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
    """Return the mean loss of the last quarter of the steps, of at least one step."""
    step_count = max(1, len(losses) // 4)
    return statistics.fmean(losses[-step_count:])
