"""The largest size that needs no more than a limit, in few questions."""

from collections.abc import Callable

FIRST_GUESS = 32
STRAIGHT = 4
"""Every so many guesses one is the middle, or twice the last, so that a crooked law costs no more than halving does."""


def largest_within(needs: Callable[[int], float], limit: float, *, low: int, top: int) -> int:
    """The largest size up to ``top`` that needs no more than a limit.

    Args:
        needs: By size; asked about once for each size. It grows, roughly straight; where it goes up and down around
            the limit, one of the edges is found.
        limit: What may be needed.
        low: Known to need no more, or the answer where nothing above does.
        top: Look no further.
    """
    known: dict[int, float] = {}
    high = top + 1
    guess = min(max(FIRST_GUESS, low + 1), top)
    while high - low > 1:
        known[guess] = needs(guess)
        if known[guess] <= limit:
            low = guess
        else:
            high = guess
        # A line lands next to the answer; halving then closes what steps leave open.
        near = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
        straight = (low + high) // 2
        if len(near) == 2 and known[near[0]] != known[near[1]]:
            slope = (known[near[0]] - known[near[1]]) / (near[0] - near[1])
            straight = near[0] + int((limit - known[near[0]]) // slope)
        elif low == guess:
            straight = 2 * low
        middle = (low + high) // 2 if high <= top else 2 * low
        guess = min(max(straight if len(known) % STRAIGHT else middle, low + 1), high - 1)
    return low
