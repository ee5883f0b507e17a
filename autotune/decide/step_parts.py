"""Where the time of logged steps went, by cause, as far as a run's rows show it. Pure."""

import collections
import statistics
from collections.abc import Sequence

from autotune.core.bottleneck import Cause, Part
from autotune.decide.statistics import block_count, blocks, of_blocks
from trainer.record import StepRow

STRAGGLER_RATIO = 1.05
"""A rank that takes so much longer than the median holds the others up."""
SAME_RANK_SHARE = 0.95
"""Of what slow ranks take longer: a device that is slow is so for long, and is nearly all of it."""


def parts_of_rows(rows: Sequence[StepRow], source: str, padding_costs: float) -> list[Part]:
    """Return every cause's part of all steps, with bounds from blocks of neighbouring ones."""
    whole = _shares(rows, padding_costs)
    each = [_shares([row], padding_costs) for row in rows]
    parts = []
    for cause, share in whole.items():
        count = block_count([one[cause] for one in each]) or 0
        means = [_shares(block, padding_costs)[cause] for block in blocks(rows, count)]
        found = of_blocks(share, means, n=len(rows)).interval()
        low = None if found.low is None else max(0.0, found.low)
        high = None if found.high is None else min(1.0, found.high)
        parts.append(Part(cause=cause, share=share, low=low, high=high, source=source))
    return parts


def _shares(rows: Sequence[StepRow], padding_costs: float) -> dict[Cause, float]:
    """Of the time of steps, what each cause took.

    Rank 0's wait for others is first theirs for their loaders, then for the slowest one, and then the network's. What a
    row says of all ranks is of an interval before it, and the first ones say nothing; so it is held against the others'
    wait in the mean of steps.
    """
    others_s = sum(row.communication_s or 0.0 for row in rows)
    own_data_s = sum(row.data_wait_s for row in rows)
    longest_s = _of_all_rows(rows, [row.longest_data_wait_s for row in rows])
    others_data_s = min(others_s, max(0.0, longest_s - own_data_s))
    slower_s = _slower_by_rank_s(rows)
    own_slow_s = slower_s.pop(0, 0.0)
    others_slow_s = min(others_s - others_data_s, sum(slower_s.values()))
    padding_s = sum((1 - row.packing_efficiency) * _own_compute_s(row) for row in rows)
    seconds: dict[Cause, float] = {
        "input": own_data_s + others_data_s,
        "straggler": own_slow_s + others_slow_s,
        "network": others_s - others_data_s - others_slow_s,
        "update": sum(row.optimizer_s for row in rows),
        "padding": padding_costs * padding_s,
        "host": sum(map(_between_s, rows)),
    }
    whole_s = sum(row.step_s for row in rows) or 1.0
    return {cause: part_s / whole_s for cause, part_s in seconds.items()}


def uneven_share(rows: Sequence[StepRow]) -> float:
    """Of the time of steps, waits for a rank that is the slowest, but another one every time, though rows are alike."""
    slower_s = _slower_by_rank_s(rows)
    whole_s = sum(slower_s.values())
    if len({row.slot_tokens for row in rows}) > 1 or max(slower_s.values(), default=0.0) >= SAME_RANK_SHARE * whole_s:
        return 0.0
    return whole_s / sum(row.step_s for row in rows)


def _slower_by_rank_s(rows: Sequence[StepRow]) -> dict[int, float]:
    """What slow ranks compute longer than the median one, by rank."""
    told = [row for row in rows if row.slowest_rank is not None]
    found: dict[int, float] = collections.defaultdict(float)
    for row in told:
        assert row.slowest_rank is not None
        found[row.slowest_rank] += _slower_by_s(row) * len(rows) / len(told)
    return found


def _of_all_rows(rows: Sequence[StepRow], seconds: Sequence[float | None]) -> float:
    """The sum over all rows of what some tell."""
    told = [one for one in seconds if one is not None]
    return len(rows) * statistics.fmean(told) if told else 0.0


def _slower_by_s(row: StepRow) -> float:
    """What the slowest rank computes longer than the median one; 0 where that is hardly anything."""
    ratio = row.slowest_rank_ratio
    if ratio is None or ratio < STRAGGLER_RATIO:
        return 0.0
    # Where rank 0 is the slowest, it is its own computing that is long.
    return row.compute_s * (1 - 1 / ratio) if row.slowest_rank == 0 else (ratio - 1) * row.compute_s


def _own_compute_s(row: StepRow) -> float:
    """Computing, without what only a slow rank 0 adds."""
    return row.compute_s - (_slower_by_s(row) if row.slowest_rank == 0 else 0.0)


def _between_s(row: StepRow) -> float:
    """Of a step that is neither waiting nor computing nor updating: the program's own doings between steps."""
    told = row.data_wait_s + row.compute_s + (row.communication_s or 0.0) + row.optimizer_s
    return max(0.0, row.step_s - told)
