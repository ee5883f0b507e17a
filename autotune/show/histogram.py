"""Sample lengths as bars of text."""

import itertools
from collections.abc import Sequence

from autotune.core.units import format_count, format_share

BAR_WIDTH = 40


def length_histogram(edges: Sequence[int], counts: Sequence[int]) -> str:
    """Draw how many samples have how many tokens, one bar per doubling; nothing for no samples.

    Args:
        edges: Lower edge of each bin, ascending; the last bin is open-ended.
        counts: Samples in each bin.
    """
    samples = sum(counts)
    if samples == 0:
        return ""
    rows = doublings(edges, counts)
    tallest = max(count for _, _, count in rows)
    labels = [_label(first, end) for first, end, _ in rows]
    width = max(len(label) for label in labels)
    lines = []
    for label, (_, _, count) in zip(labels, rows, strict=True):
        bar = "#" * max(round(BAR_WIDTH * count / tallest), 1 if count else 0)
        share = format_share(count / samples)
        lines.append(f"{label:>{width}}  {bar:<{BAR_WIDTH}}  {format_count(count):>9}  {share:>7}")
    return "\n".join(lines)


def doublings(edges: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int | None, int]]:
    """Bins joined into (first, end or None, samples), one per power of two, without empty ones at either end."""
    ends = [*edges[1:], None]
    bins = zip(edges, ends, counts, strict=True)
    rows: list[tuple[int, int | None, int]] = []
    for _, group in itertools.groupby(bins, key=lambda bin_: bin_[0].bit_length()):
        joined = list(group)
        rows.append((joined[0][0], joined[-1][1], sum(count for _, _, count in joined)))
    filled = [index for index, (_, _, count) in enumerate(rows) if count]
    return rows[filled[0] : filled[-1] + 1]


def _label(first: int, end: int | None) -> str:
    return f"{format_count(first)} or more" if end is None else f"{format_count(first)} to {format_count(end - 1)}"
