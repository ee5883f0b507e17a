"""Choose the settings of the profile from what was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.evidence import CurvePoint
from autotune.errors import BadInput

KNEE_SHARE = 0.98
"""Within two per cent of the best is as good as the best."""
DEFAULT_GLOBAL_BATCH_SAMPLES = 256
"""BERT's (Devlin et al. 2018), the baseline recipe where the user names no global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChoice:
    """The micro-batch to train with, and why it is not the largest that fits."""

    rows: int
    reason: str


def choose_predicted(rows_least: int, rows_most: int, headroom_share: float) -> MicroBatchChoice:
    """The micro-batch of a machine that is not here: the least that should fit, less the headroom.

    Args:
        rows_least: The largest micro-batch with all that is assumed at its most; 0 where not even one row fits.
        rows_most: The same with all that is assumed at its least.
        headroom_share: What is left free.
    """
    fit = f"{rows_least} rows" if rows_least == rows_most else f"the least of {rows_least} to {rows_most} rows"
    basis = f"{fit} that are predicted to fit, less {100 * headroom_share:g} % headroom"
    if rows_least == 0:
        basis = "one row, and with all that is assumed at its most not even that is predicted to fit"
    rows = rows_with_headroom(rows_least, headroom_share)
    return MicroBatchChoice(rows=rows, reason=f"not probed: {basis}; the knee of throughput is not measured")


def rows_with_headroom(feasible_max: int, headroom_share: float) -> int:
    """The largest micro-batch that leaves the headroom free; one row at least."""
    return max(1, math.floor(feasible_max * (1 - headroom_share)))


def curve_rows(limit_rows: int) -> list[int]:
    """Micro-batches at which throughput is measured: powers of two, and the limit itself."""
    powers = [2**exponent for exponent in range(limit_rows.bit_length()) if 2**exponent < limit_rows]
    return [*powers, limit_rows]


def choose_micro_batch(curve: Sequence[CurvePoint], feasible_max: int) -> MicroBatchChoice:
    """The smallest measured micro-batch within two per cent of the best throughput.

    Args:
        curve: What was measured; the largest is the one that leaves the headroom free.
        feasible_max: The largest that fits.
    """
    best = max(curve, key=lambda point: point.slot_tokens_per_s)
    enough = [point for point in curve if point.slot_tokens_per_s >= KNEE_SHARE * best.slot_tokens_per_s]
    chosen = min(enough, key=lambda point: point.rows)
    limit = max(point.rows for point in curve)
    if chosen.rows != best.rows:
        share = chosen.slot_tokens_per_s / best.slot_tokens_per_s
        reason = f"it has {share:.1%} of the best tokens/s ({best.rows} rows); smaller ones are under {KNEE_SHARE:.0%}"
    elif chosen.rows == limit:
        below = f"the largest that leaves the headroom below the {feasible_max} that fit"
        largest = "the largest that fits" if limit == feasible_max else below
        reason = f"the fastest, and {largest}; smaller ones are under {KNEE_SHARE:.0%} of it"
    else:
        reason = f"the fastest of those measured up to {limit}; smaller ones are under {KNEE_SHARE:.0%} of it"
    return MicroBatchChoice(rows=chosen.rows, reason=reason)


def choose_untimed(rows: int) -> MicroBatchChoice:
    """The micro-batch of a pretended GPU, on which throughput cannot be measured: the largest with headroom."""
    reason = "the largest that leaves the headroom, by torch's allocator; a pretended GPU has no throughput"
    return MicroBatchChoice(rows=rows, reason=reason)


def knee_interval(curve: Sequence[CurvePoint]) -> tuple[int, int] | None:
    """Between which sizes the smallest within two per cent of the best lies; None where steps show no spread.

    At its earliest a size is taken at the upper end of its interval and the best at its lower, and the other way round.
    """
    ends = [(point.rows, point.slot_tokens_per_s_low, point.slot_tokens_per_s_high) for point in curve]
    known = [(rows, low, high) for rows, low, high in ends if low is not None and high is not None]
    if len(known) < len(ends) or not ends:
        return None
    best_rows, best_low, best_high = max(known, key=lambda end: end[1] * end[2])
    earliest = min(rows for rows, _, high in known if high >= KNEE_SHARE * best_low)
    latest = min(rows for rows, low, _ in known if low >= KNEE_SHARE * best_high or rows == best_rows)
    return earliest, latest


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How a global batch is dealt to ranks and micro-batches; it is kept exactly."""

    micro_batches: int
    rows_per_micro_batch: int
    empty_rows: int
    """Slots of the last micro-batches that hold nothing."""
    without_empty: tuple[int, ...]
    """The nearest global batches, below and above, that leave none empty."""


def deal(global_rows: int, micro_batch_rows: int, ranks: int) -> Dealing:
    """Deal a global batch, as the trainer does.

    Raises:
        BadInput: If there are fewer rows than ranks, with the nearest global batch that there could be.
    """
    if global_rows < ranks:
        raise BadInput(
            f"a global batch of {global_rows} rows leaves some of {ranks} ranks without a row",
            next_step=f"Ask for at least {ranks} rows, or use at most {global_rows} ranks.",
        )
    micro_batches = math.ceil(global_rows / (micro_batch_rows * ranks))
    unit = micro_batches * ranks
    rows = math.ceil(global_rows / unit)
    empty = rows * unit - global_rows
    nearest = tuple(sorted({max(unit, global_rows // unit * unit), rows * unit})) if empty else ()
    return Dealing(micro_batches=micro_batches, rows_per_micro_batch=rows, empty_rows=empty, without_empty=nearest)


def global_batch_rows(global_batch_tokens: int, mean_real_tokens_per_row: float) -> int:
    """The number of rows whose real tokens come closest to the global batch; one row at least."""
    return max(1, round(global_batch_tokens / mean_real_tokens_per_row))
