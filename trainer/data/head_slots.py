"""Slots of the MLM head: the number of positions for which it computes logits.

Every token is masked independently, so the number of tokens to predict varies between
micro-batches. The number of slots does not, so that the shapes of the head are fixed.
"""

import math

SLOTS_MULTIPLE = 64
"""Multiple to which slots are rounded up: whole tiles of Tensor Cores."""
_SLOTS_SIGMAS = 6.0
"""Standard deviations above the mean that have slots: more tokens to predict come once
in a billion micro-batches."""


def head_slots(positions: int, probability: float) -> int:
    """Return the number of slots for tokens to predict in this many positions.

    It is a multiple of ``SLOTS_MULTIPLE``, so it may exceed the number of positions.
    """
    # The number of tokens to predict has a binomial distribution.
    mean = positions * probability
    sigma = math.sqrt(mean * (1 - probability))
    likely_slots = mean + _SLOTS_SIGMAS * sigma
    return min(
        _rounded_up(math.ceil(likely_slots), SLOTS_MULTIPLE),
        _rounded_up(positions, SLOTS_MULTIPLE),
    )


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
