"""Check that settings differ in rounding only and learn the same: two runs from one start, on the same data. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOSS_STEPS = 48
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
    message: str


def fell_too_little(losses: Sequence[float], name: str) -> LossVerdict | None:
    """Return the verdict if the loss of a reference, trained with ``name``, did not fall; None if it did."""
    last = _last(losses)
    if last < (1 - LEAST_FALL_SHARE) * losses[0]:
        return None
    fall = f"from {losses[0]:.4f} to {last:.4f} in {len(losses)} steps"
    told = (
        f"not checked: with {name} the loss went {fall}, too little to show a"
        " difference"
    )
    return LossVerdict(equal=False, message=told)


def compare_losses(
    reference: Sequence[float], other: Sequence[float], names: tuple[str, str]
) -> LossVerdict:
    """Compare the losses of the last quarter of the steps.

    ``names`` are those of the two settings.
    """
    first, second = _last(reference), _last(other)
    apart = abs(second / first - 1)
    equal = apart <= EQUAL_LOSS_SHARE
    told = (
        f"after {len(reference)} steps the loss was {second:.4f} with {names[1]} and"
        f" {first:.4f} with {names[0]}: {apart:.2%} apart,"
        f" {'' if equal else 'not '}within {EQUAL_LOSS_SHARE:.0%}"
    )
    return LossVerdict(equal=equal, message=told)


def _last(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])
