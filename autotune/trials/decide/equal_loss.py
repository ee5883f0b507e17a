"""Whether training rounds differently and learns the same: two runs from one start, on the same rows. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOSS_STEPS = 48
EQUAL_LOSS_SHARE = 0.01
"""Losses may lie so far apart at the end of the check."""
CHECK_WARM_UP_STEPS = 8
"""Of the check, whatever the recipe's: weights that hardly move show nothing."""
LEAST_FALL_SHARE = 0.02
"""What the loss must fall by in the check, before an equal one means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossVerdict:
    """What a check came to."""

    equal: bool
    told: str


def fell_too_little(losses: Sequence[float], name: str) -> LossVerdict | None:
    """Return what to say of a reference, trained with ``name``, whose loss did not fall; None if it did."""
    last = _last(losses)
    if last < (1 - LEAST_FALL_SHARE) * losses[0]:
        return None
    told = (
        f"not checked: in {len(losses)} steps the loss went from {losses[0]:.4f} to {last:.4f} with {name}, too little "
        "for a difference to show"
    )
    return LossVerdict(equal=False, told=told)


def compare_losses(reference: Sequence[float], other: Sequence[float], names: tuple[str, str]) -> LossVerdict:
    """Compare the losses of the last quarter of the steps; ``names`` say what they trained with."""
    first, second = _last(reference), _last(other)
    apart = abs(second / first - 1)
    equal = apart <= EQUAL_LOSS_SHARE
    told = (
        f"after {len(reference)} steps the loss was {second:.4f} with {names[1]} and {first:.4f} with {names[0]}: "
        f"{apart:.2%} apart, {'' if equal else 'not '}within {EQUAL_LOSS_SHARE:.0%}"
    )
    return LossVerdict(equal=equal, told=told)


def _last(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])
