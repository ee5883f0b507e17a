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
        round_up(math.ceil(likely_slots), SLOTS_MULTIPLE),
        round_up(positions, SLOTS_MULTIPLE),
    )


def round_up(number: int, multiple_of: int) -> int:
    """Return the smallest multiple that is not below a number."""
    # Floor division rounds down; of the negated number, it rounds the quotient up.
    return -(-number // multiple_of) * multiple_of
