"""Choose the settings of the profile from what was measured."""

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
"""Within two per cent of the best is as good as the best."""
DEFAULT_GLOBAL_BATCH_TOKENS = 524_288
"""Non-padding tokens if you name no global batch: between BERT's 131 thousand and RoBERTa's 4 million."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchChoice:
    """The micro-batch to train with, and why it is not the largest that fits."""

    micro_batch_size: int
    reason: str


def default_layout(model: ModelSettings) -> Layout:
    """Return packed where this project knows the architecture's attention, else padded."""
    return "packed" if model.config["model_type"] in FAMILIES else "padded"


def default_precision(device: Literal["cpu", "cuda"]) -> Precision:
    """Return the precision of matrix multiplications on such a device."""
    return "bf16" if device == "cuda" else "fp32"


def with_headroom(feasible_max: int, headroom_share: float) -> int:
    """The largest micro-batch that leaves the headroom free; one row at least."""
    return max(1, math.floor(feasible_max * (1 - headroom_share)))


def curve_sizes(limit_rows: int) -> list[int]:
    """Micro-batches at which throughput is measured: powers of two, and the limit itself."""
    powers = [2**exponent for exponent in range(limit_rows.bit_length()) if 2**exponent < limit_rows]
    return [*powers, limit_rows]


def choose_micro_batch(
    curve: Sequence[CurvePoint], feasible_max: int, *, global_batch_size: int, ranks: int, sizes: Sequence[int] | None = None
) -> MicroBatchChoice:
    """Return the smallest micro-batch within two per cent of the least predicted time per optimizer step.

    A step takes as many micro-batches as hold the global batch, each as long as the curve says, empty rows included:
    65 rows take 8 micro-batches of 9, or 13 of 5. The largest point of the curve leaves the headroom free; without
    ``sizes`` only measured ones are chosen from.
    """
    points = sorted(curve, key=lambda point: point.micro_batch_size)
    limit = points[-1].micro_batch_size
    step_s = {
        rows: _step_s(points, split_global_batch(max(global_batch_size, ranks), rows, ranks))
        for rows in sizes or [point.micro_batch_size for point in points]
        if rows <= limit
    }
    least = min(step_s.values())
    rows = min(rows for rows, seconds in step_s.items() if seconds * KNEE_SHARE <= least)
    split = split_global_batch(max(global_batch_size, ranks), rows, ranks)
    if split.gradient_accumulation_steps == 1:
        need = f"your global batch needs {split.micro_batch_size} per GPU"
        return MicroBatchChoice(micro_batch_size=rows, reason=f"{feasible_max} fit; {need}")
    words = f"{split.gradient_accumulation_steps} micro-batches of {rows} take the least predicted time per optimizer step"
    whole = split_global_batch(max(global_batch_size, ranks), limit, ranks)
    if rows == limit:
        fit = "no more fit" if limit == feasible_max else f"the headroom is left below the {feasible_max} that fit"
        return MicroBatchChoice(micro_batch_size=rows, reason=f"{words}; {fit}")
    ratio = _step_s(points, whole) / step_s[rows]
    others = f"{whole.gradient_accumulation_steps} of {limit} take {ratio:.1%} of it"
    return MicroBatchChoice(micro_batch_size=rows, reason=f"{words}; {others}; {feasible_max} fit")


def _step_s(points: Sequence[CurvePoint], split: "GlobalBatchSplit") -> float:
    """Return the seconds of an optimizer step, interpolated between measured micro-batches."""
    seconds = [point.micro_batch_size / point.padded_tokens_per_s for point in points]  # in rows' tokens, the same for all
    micro_s = np.interp(split.micro_batch_size, [point.micro_batch_size for point in points], seconds)
    return split.gradient_accumulation_steps * float(micro_s)


def choose_untimed(rows: int) -> MicroBatchChoice:
    """The micro-batch of a pretended GPU, on which throughput cannot be measured: the largest with headroom."""
    reason = "the largest that leaves the headroom, by torch's allocator; a pretended GPU has no throughput"
    return MicroBatchChoice(micro_batch_size=rows, reason=reason)


def knee_interval(curve: Sequence[CurvePoint]) -> tuple[int, int] | None:
    """Return between which sizes the smallest within two per cent of the best lies; None if steps show no spread."""
    ends = [(point.micro_batch_size, point.padded_tokens_per_s_low, point.padded_tokens_per_s_high) for point in curve]
    known = [(rows, low, high) for rows, low, high in ends if low is not None and high is not None]
    if len(known) < len(ends) or not ends:
        return None
    best_rows, best_low, best_high = max(known, key=lambda end: end[1] * end[2])
    earliest = min(rows for rows, _, high in known if high >= KNEE_SHARE * best_low)
    latest = min(rows for rows, low, _ in known if low >= KNEE_SHARE * best_high or rows == best_rows)
    return earliest, latest


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatchSplit:
    """How a global batch is dealt to ranks and micro-batches; it is kept exactly."""

    gradient_accumulation_steps: int
    micro_batch_size: int
    empty_rows: int
    """Slots of the last micro-batches that hold nothing."""
    without_empty: tuple[int, ...]
    """The nearest global batches, below and above, that leave none empty."""


def split_global_batch(global_batch_size: int, micro_batch_size: int, ranks: int) -> GlobalBatchSplit:
    """Deal a global batch, as the trainer does; ``BadInput`` if there are fewer rows than ranks."""
    if global_batch_size < ranks:
        raise BadInput(
            f"a global batch of {global_batch_size} rows leaves some of {ranks} ranks without a row",
            next_step=f"Ask for at least {ranks} rows, or use at most {global_batch_size} ranks.",
        )
    micro_batches = math.ceil(global_batch_size / (micro_batch_size * ranks))
    unit = micro_batches * ranks
    rows = math.ceil(global_batch_size / unit)
    empty = rows * unit - global_batch_size
    nearest = tuple(sorted({max(unit, global_batch_size // unit * unit), rows * unit})) if empty else ()
    return GlobalBatchSplit(gradient_accumulation_steps=micro_batches, micro_batch_size=rows, empty_rows=empty, without_empty=nearest)


def global_batch_size_of(global_batch_tokens: int, mean_tokens_per_sequence: float) -> int:
    """The number of rows whose real tokens come closest to the global batch; one row at least."""
    return max(1, round(global_batch_tokens / mean_tokens_per_sequence))
