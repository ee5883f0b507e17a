"""Slots of the MLM head: the number of positions for which it computes logits.

Every token is masked independently, so the number of tokens to predict varies between
micro-batches. The number of slots does not, so that the shapes of the head are fixed.
"""

import math

from trainer.formats.train_config import TrainConfig

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


def fixed_slots(config: TrainConfig) -> int | None:
    """Return the number of slots that micro-batches hardly exceed.

    It is None if shapes may change: then a micro-batch has no unused slots.
    """
    if not (config.compiled or config.device == "cuda"):
        return None
    positions = config.micro_batch_size * config.seq_length_tokens
    return head_slots(positions, config.masking_probability)


def sufficient_slots(needed: int, fixed: int | None) -> int:
    """Return a number of slots that suffices, at least 1.

    Args:
        needed: Number of tokens to predict.
        fixed: Number that micro-batches hardly exceed. One that does gets the smallest
            sufficient multiple of it, so that few different shapes occur. None if
            shapes may change.
    """
    at_least_one = max(1, needed)
    return at_least_one if fixed is None else round_up(at_least_one, fixed)


def round_up(number: int, multiple_of: int) -> int:
    """Return the smallest multiple that is not below a number."""
    # Floor division rounds down; of the negated number, it rounds the quotient up.
    return -(-number // multiple_of) * multiple_of
