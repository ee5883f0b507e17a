"""How much of many a page shows, so that people can still read it; the JSON file has all of it. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from autotune.show.report.document import Block, LeftOut

MOST_DRAWN_PROFILES = 6
"""The charts of so many are drawn."""
MOST_TRIALS = 2400
"""Of all profiles together."""
MOST_RUNS = 200
"""In a table of runs."""
MOST_CURVES, MOST_STACKS = 6, 8
"""In one chart."""
MOST_CARDS, MOST_ROWS = 30, 200
"""Recommendations in full, and in a table; what is missing; events of all runs."""
LONG_TABLE_ROWS = 24
"""A table with more has a window of its own."""
MOST_EVENTS = 20
"""Of one run that are told, the latest; its record has all."""

T = TypeVar("T")


def first_of(
    many: Sequence[T], most: int, what: str, *, first: Callable[[T], bool] | None = None, which: str = "the first"
) -> tuple[Sequence[T], tuple[Block, ...]]:
    """As many as fit, in their own order, and what says so where that is not all of them.

    Args:
        many: All of them.
        most: So many fit.
        what: They are, in the plural.
        first: Of which some come before others when not all fit.
        which: Says which are shown.
    """
    if len(many) <= most:
        return many, ()
    ranked = sorted(range(len(many)), key=lambda number: first is not None and not first(many[number]))
    kept = [many[number] for number in sorted(ranked[:most])]
    return kept, (LeftOut(what=what, shown=most, of=len(many), which=which),)


def fair_share(sizes: Sequence[int], most: int) -> int:
    """How many of each fit, if all are cut to the same and those that have fewer leave their room to the others."""
    share, left = most, most
    for place, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - place)
        if size > share:
            return share
        left -= size
    return max(share, max(sizes, default=0))
