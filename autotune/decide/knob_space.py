"""Which settings of the step are explored together: every way to train that keeps the global batch. Pure."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.knobs import Knobs
from autotune.decide.choose import deal
from trainer.config import Attention, Checkpointing, Layout, Precision

ROW_DOUBLINGS = 5
"""Micro-batches from the largest useful one down to one so many times halved: far below the knee nothing is fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The values of each knob but the micro-batch; the first of each is the unexplored one."""

    precision: Sequence[Precision]
    attention: Sequence[Attention]
    checkpointing: Sequence[Checkpointing]
    compile_layers: Sequence[bool]
    layout: Sequence[Layout]


def knob_space(
    unexplored: Knobs,
    levels: Levels,
    global_rows: Mapping[Layout, int],
    ranks: int,
    most_rows: Callable[[Knobs], int],
) -> tuple[Knobs, ...]:
    """All cells, the unexplored one first.

    Args:
        unexplored: What the profile has.
        levels: What else there is.
        global_rows: The global batch by layout: the same real tokens are fewer packed rows than padded ones.
        ranks: That share it.
        most_rows: The largest micro-batch that may be tried, by the other knobs.
    """
    cells = [with_dealt_rows(unexplored, global_rows, ranks)]
    for precision, attention, checkpointing, compiled, layout in itertools.product(
        levels.precision, levels.attention, levels.checkpointing, levels.compile_layers, levels.layout
    ):
        one = Knobs(
            precision=precision,
            attention=attention,
            checkpointing=checkpointing,
            compile_layers=compiled,
            layout=layout,
            micro_batch_rows=1,
        )
        cells += [
            replace(one, micro_batch_rows=rows) for rows in micro_batches(global_rows[layout], ranks, most_rows(one))
        ]
    return tuple(dict.fromkeys(cells))


def with_dealt_rows(knobs: Knobs, global_rows: Mapping[Layout, int], ranks: int) -> Knobs:
    """With the rows that a micro-batch really has once the global batch is dealt."""
    dealt = deal(global_rows[knobs.layout], knobs.micro_batch_rows, ranks)
    return replace(knobs, micro_batch_rows=dealt.rows_per_micro_batch)


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


def useful_share(knobs: Knobs, global_rows: Mapping[Layout, int], ranks: int) -> float:
    """Part of the computed rows that the global batch fills."""
    dealt = deal(global_rows[knobs.layout], knobs.micro_batch_rows, ranks)
    computed = dealt.micro_batches * dealt.rows_per_micro_batch * ranks
    return global_rows[knobs.layout] / computed
