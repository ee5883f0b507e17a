"""Choice of micro-batch size, batch split and defaults of a profile."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.errors import BadInput
from autotune.memory.values import CurvePoint
from trainer.config.train_config import Layout, ModelSettings, Precision
from trainer.model.families import FAMILIES

KNEE_SHARE = 0.98
"""Share of the best throughput above which a size counts as equal to the best."""
DEFAULT_GLOBAL_BATCH_TOKENS = 524_288
"""Non-padding tokens of the default global batch, between BERT's 131 thousand and
RoBERTa's 4 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChoice:
    """Micro-batch size to train with, and the reason why it is not the largest that fits."""

    micro_batch_size: int
    reason: str


def default_layout(model: ModelSettings) -> Layout:
    """Return ``packed`` if the architecture takes packed sequences, else ``padded``."""
    return "packed" if model.config["model_type"] in FAMILIES else "padded"


def default_precision(device: Literal["cpu", "cuda"]) -> Precision:
    """Return the default matmul precision of a device."""
    return "bf16" if device == "cuda" else "fp32"


def with_headroom(feasible_max: int, headroom_share: float) -> int:
    """Return the largest micro-batch size that leaves the headroom free; at least 1."""
    return max(1, math.floor(feasible_max * (1 - headroom_share)))


def curve_sizes(limit_rows: int) -> list[int]:
    """Return the micro-batch sizes at which throughput is measured: powers of two, and the limit itself."""
    powers = [
        2**exponent
        for exponent in range(limit_rows.bit_length())
        if 2**exponent < limit_rows
    ]
    return [*powers, limit_rows]


def choose_micro_batch(
    curve: Sequence[CurvePoint],
    feasible_max: int,
    *,
    global_batch_size: int,
    ranks: int,
    sizes: Sequence[int] | None = None,
) -> MicroBatchChoice:
    """Return the smallest micro-batch size within 2 % of the least predicted time per optimizer step.

    A step takes as many micro-batches as hold the global batch, each as long as the
    curve predicts, empty sequences included: 65 sequences take 8 micro-batches of 9, or
    13 of 5. The largest point of the curve leaves the headroom free; without ``sizes``,
    only measured sizes are candidates.
    """
    points = sorted(curve, key=lambda point: point.micro_batch_size)
    limit = points[-1].micro_batch_size
    asked = [
        rows
        for rows in sizes or [point.micro_batch_size for point in points]
        if rows <= limit
    ]
    step_s = {
        rows: _step_s(
            points, split_global_batch(max(global_batch_size, ranks), rows, ranks)
        )
        for rows in asked
    }
    least = min(step_s.values())
    rows = min(
        rows for rows, seconds in step_s.items() if seconds * KNEE_SHARE <= least
    )
    split = split_global_batch(max(global_batch_size, ranks), rows, ranks)
    if split.gradient_accumulation_steps == 1:
        need = f"your global batch needs {split.micro_batch_size} per GPU"
        return MicroBatchChoice(
            micro_batch_size=rows, reason=f"{feasible_max} fit; {need}"
        )
    words = (
        f"micro-batch size {rows} x {split.gradient_accumulation_steps} accumulation"
        " steps"
    )
    fit = f"{feasible_max} is the largest that fits"
    if rows == limit:
        free = "" if limit == feasible_max else ", but leaves no headroom"
        return MicroBatchChoice(
            micro_batch_size=rows,
            reason=f"{words} has the shortest predicted step; {fit}{free}",
        )
    whole = split_global_batch(max(global_batch_size, ranks), limit, ranks)
    more = _step_s(points, whole) / step_s[rows] - 1
    words += (
        f" is the smallest split within {1 - KNEE_SHARE:.0%} of the shortest predicted"
        " step"
    )
    more_or_less = f"{abs(more):.1%} {'more' if more > 0 else 'less'} time"
    other = f"{limit} x {whole.gradient_accumulation_steps} would take {more_or_less}"
    return MicroBatchChoice(micro_batch_size=rows, reason=f"{words}; {other}; {fit}")


def _step_s(points: Sequence[CurvePoint], split: "GlobalBatchSplit") -> float:
    """Return the seconds of an optimizer step per position of a sequence, interpolated between measured sizes."""
    # Per position of a sequence.
    seconds = [point.micro_batch_size / point.padded_tokens_per_s for point in points]
    micro_s = np.interp(
        split.micro_batch_size, [point.micro_batch_size for point in points], seconds
    )
    return split.gradient_accumulation_steps * float(micro_s)


def knee_interval(curve: Sequence[CurvePoint]) -> tuple[int, int] | None:
    """Return bounds of the smallest micro-batch size within 2 % of the best.

    None if the steps show no spread.
    """
    ends = [
        (
            point.micro_batch_size,
            point.padded_tokens_per_s_low,
            point.padded_tokens_per_s_high,
        )
        for point in curve
    ]
    known = [
        (rows, low, high)
        for rows, low, high in ends
        if low is not None and high is not None
    ]
    if len(known) < len(ends) or not ends:
        return None
    best_rows, best_low, best_high = max(known, key=lambda end: end[1] * end[2])
    earliest = min(rows for rows, _, high in known if high >= KNEE_SHARE * best_low)
    latest = min(
        rows
        for rows, low, _ in known
        if low >= KNEE_SHARE * best_high or rows == best_rows
    )
    return earliest, latest


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchSplit:
    """Split of a global batch into ranks and micro-batches.

    The global batch is kept exactly.
    """

    gradient_accumulation_steps: int
    micro_batch_size: int
    empty_sequences: int
    """Number of empty sequences in the last micro-batches."""
    without_empty: tuple[int, ...]
    """Nearest global batches, below and above, that leave no sequence empty."""


def split_global_batch(
    global_batch_size: int, micro_batch_size: int, ranks: int
) -> GlobalBatchSplit:
    """Split a global batch as the trainer does.

    Raises:
        BadInput: If it has fewer sequences than ranks.
    """
    if global_batch_size < ranks:
        next_step = (
            f"Use at least {ranks} sequences per global batch, or at most"
            f" {global_batch_size} ranks."
        )
        raise BadInput(
            f"global batch size {global_batch_size} is too small for {ranks} ranks",
            next_step=next_step,
        )
    micro_batches = math.ceil(global_batch_size / (micro_batch_size * ranks))
    unit = micro_batches * ranks
    rows = math.ceil(global_batch_size / unit)
    empty = rows * unit - global_batch_size
    nearest = (
        tuple(sorted({max(unit, global_batch_size // unit * unit), rows * unit}))
        if empty
        else ()
    )
    return GlobalBatchSplit(
        gradient_accumulation_steps=micro_batches,
        micro_batch_size=rows,
        empty_sequences=empty,
        without_empty=nearest,
    )


def global_batch_size_of(
    global_batch_tokens: int, mean_tokens_per_sequence: float
) -> int:
    """Return the number of sequences whose non-padding tokens come closest to the global batch; at least 1."""
    return max(1, round(global_batch_tokens / mean_tokens_per_sequence))
