"""Ranks as text, for messages of checks."""

from collections.abc import Sequence

_SHOWN_RANKS = 4
"""Most ranks that a message names by number, as a job may have hundreds."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``ranks 0, 1, 2, 3 and 12 more``."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    text = f"{noun} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}"
    hidden = len(ranks) - _SHOWN_RANKS
    if hidden > 0:
        text += f" and {hidden} more"
    return text
