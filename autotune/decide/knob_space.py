"""Which settings of the step are explored together: every way to train that keeps the global batch. Pure."""

import itertools
from collections.abc import Callable, Mapping, Sequence

from autotune.core.exploration import Configuration
from autotune.decide.choose import deal
from trainer.config import Layout

ROW_DOUBLINGS = 5
"""Micro-batches from the largest useful one down to one so many times halved: far below the knee nothing is fastest."""


def knob_space(
    unexplored: Configuration,
    levels: Mapping[str, Sequence[object]],
    global_rows: Mapping[Layout, int],
    ranks: int,
    most_rows: Callable[[Configuration], int],
) -> tuple[Configuration, ...]:
    """All cells, the unexplored one first.

    Args:
        unexplored: What the profile has.
        levels: The values of each knob but the micro-batch; the first of each is the unexplored one.
        global_rows: The global batch by layout: the same real tokens are fewer packed rows than padded ones.
        ranks: That share it.
        most_rows: The largest micro-batch that may be tried, by the other knobs.
    """
    cells = [with_dealt_rows(unexplored, global_rows, ranks)]
    for values in itertools.product(*levels.values()):
        one = unexplored.but(**dict(zip(levels, values, strict=True))).kind
        cells += [
            one.but(micro_batch_rows=rows) for rows in micro_batches(global_rows[one.layout], ranks, most_rows(one))
        ]
    return tuple(dict.fromkeys(cells))


def with_dealt_rows(knobs: Configuration, global_rows: Mapping[Layout, int], ranks: int) -> Configuration:
    """With the rows that a micro-batch really has once the global batch is dealt."""
    dealt = deal(global_rows[knobs.layout], knobs.micro_batch_rows, ranks)
    return knobs.but(micro_batch_rows=dealt.rows_per_micro_batch)


def micro_batches(global_rows: int, ranks: int, most_rows: int) -> list[int]:
    """Micro-batches worth trying, as dealt: the largest useful one, and powers of two below it, ascending.

    None where the global batch would leave a rank without a row.
    """
    largest = min(most_rows, -(-global_rows // ranks))
    if largest < 1 or global_rows < ranks:
        return []
    asked = {largest} | {2**exponent for exponent in range(largest.bit_length()) if 2**exponent <= largest}
    kept = [rows for rows in asked if rows * 2**ROW_DOUBLINGS >= largest]
    return sorted({deal(global_rows, rows, ranks).rows_per_micro_batch for rows in kept})


def useful_share(knobs: Configuration, global_rows: Mapping[Layout, int], ranks: int) -> float:
    """Part of the computed rows that the global batch fills."""
    dealt = deal(global_rows[knobs.layout], knobs.micro_batch_rows, ranks)
    computed = dealt.micro_batches * dealt.rows_per_micro_batch * ranks
    return global_rows[knobs.layout] / computed
