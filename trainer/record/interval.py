"""Metrics of the steps between two logged ones, and their sums over ranks.

The sums are one tensor, so that an interval costs one all-reduce and one copy to the
host. ``pack_sums`` and ``unpack_sums`` define its layout: the totals, then a table with
a row per quantity and a column per rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np
import torch

from trainer.data.micro_batch import MicroBatch
from trainer.distributed.step import StepResult
from trainer.formats.gpu_activity import GpuActivity
from trainer.model.flops import ModelWork
from trainer.record.process_memory import peak_memory_bytes
from trainer.runtime.device_events import DeviceEvent, to_device
from trainer.runtime.ranks import Ranks

_NUMBER_OF_TOTALS = 5
"""Totals at the beginning of the sums. In this order: non-padding tokens, padded
tokens, FLOPs, and the mean squared norms of part and whole gradients."""
_GPU_FIGURES = tuple(figure.name for figure in fields(GpuActivity))
"""Figures of GPU activity, in the order of their rows."""
_ROWS_BEFORE_GPUS = 3
_ROWS_BY_RANK = _ROWS_BEFORE_GPUS + len(_GPU_FIGURES)
"""Rows of the table that follows. In this order: compute times, data waits, peak
memory, and a row for each figure of GPU activity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """One rank's means per step in an interval, in seconds."""

    step_s: float
    """Wall time."""
    compute_s: float | None
    """Time of forward and backward; None if communication cannot be told apart."""
    data_wait_s: float
    """Time that the device was idle, waiting for data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSample:
    """Squared gradient norms of a step and of a part of it, as tensors of shape ().

    The gradient noise scale is estimated from them.
    """

    part_share: float
    """Share of the step's tokens that are in the part."""
    part_square: torch.Tensor
    """Squared norm of the part's mean gradient."""
    whole_square: torch.Tensor
    """Squared norm of the whole step's mean gradient."""


@dataclass(slots=True, kw_only=True)
class Interval:
    """Metrics of one rank since the last logged step."""

    began: DeviceEvent
    """Event before the first step."""
    results: list[StepResult] = field(default_factory=list)
    """Results of its steps, in order."""
    non_padding_tokens: int = 0
    padded_tokens: int = 0
    """Positions of all sequences, padding included."""
    flops: float = 0.0
    """Model FLOPs of its non-padding tokens."""
    noise_samples: list[NoiseSample] = field(default_factory=list)
    """Gradients of the steps whose part was measured."""

    def add(
        self, batches: Sequence[MicroBatch], result: StepResult, work: ModelWork
    ) -> None:
        """Count a step.

        Args:
            batches: Micro-batches of this rank.
            result: Result of the step.
            work: FLOPs of the model, by the lengths of its documents.
        """
        for batch in batches:
            lengths = batch.tokens_N.numpy().astype(np.int64)
            self.non_padding_tokens += batch.non_padding_tokens
            self.padded_tokens += batch.ids_BS.numel()
            self.flops += work.step_flops(lengths, batch.predicted_tokens)
        self.results.append(result)
        if result.partial is not None:
            self.noise_samples.append(
                NoiseSample(
                    part_share=result.partial.share,
                    part_square=result.partial.squared_norm.double(),
                    whole_square=result.grad_norm.square().double(),
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSums:
    """Metrics of an interval over all ranks."""

    non_padding_tokens: float
    padded_tokens: float
    """Positions of all sequences, padding included."""
    flops: float
    """Model FLOPs of the non-padding tokens."""
    part_square: float
    """Squared norm of the parts' mean gradients, mean over steps, summed over ranks."""
    whole_square: float
    """Squared norm of the steps' mean gradients, mean over steps, summed over ranks."""
    compute_by_rank_s: list[float]
    """Compute time per step in the previous interval; 0 in the first, NaN if
    unknown."""
    data_wait_by_rank_s: list[float]
    """Data wait per step in the previous interval; 0 in the first."""
    peak_memory_by_rank_bytes: list[float]
    """Peak memory since the start."""
    gpu_activity: GpuActivity
    """Mean over the GPUs of which a figure was read."""
    gpu_busy_by_rank: list[float]
    """Share of time in which a rank's GPU was busy; NaN if it was not read."""


def pack_sums(
    interval: Interval,
    previous_pace: Pace | None,
    activity_by_rank: Mapping[int, GpuActivity],
    ranks: Ranks,
) -> torch.Tensor:
    """Return this rank's metrics as a tensor to be summed over ranks, on the device.

    Args:
        interval: Interval that ends now.
        previous_pace: This rank's pace in the previous interval; None in the first.
        activity_by_rank: Activity of the GPUs that this rank has read, by the rank that
            uses each. One rank has to report every rank's, even if it is unknown.
        ranks: This rank, and the number of all.

    Returns:
        Tensor of dtype fp64; ``unpack_sums`` reads the sum of those of all ranks.
    """
    totals = [interval.non_padding_tokens, interval.padded_tokens, interval.flops]
    compute_s = 0.0
    data_wait_s = 0.0
    if previous_pace is not None:
        # A compute time that is unknown on one rank is so on all.
        known_s = previous_pace.compute_s
        compute_s = math.nan if known_s is None else known_s
        data_wait_s = previous_pace.data_wait_s
    table = [
        *_row_of_rank(compute_s, ranks),
        *_row_of_rank(data_wait_s, ranks),
        *_row_of_rank(float(peak_memory_bytes(ranks.device)), ranks),
        *_gpu_rows(activity_by_rank, ranks),
    ]
    return torch.cat(
        [
            to_device(totals, ranks.device),
            _mean_squares(interval.noise_samples, ranks.device),
            to_device(table, ranks.device),
        ]
    )


def _row_of_rank(value: float, ranks: Ranks) -> list[float]:
    """Return a row of the table that has this rank's value, and zeros for the others.

    The sum of these rows over ranks has the values of all ranks.
    """
    row = [0.0] * ranks.world_size
    row[ranks.rank] = value
    return row


def _gpu_rows(activity_by_rank: Mapping[int, GpuActivity], ranks: Ranks) -> list[float]:
    """Return a row for each figure of GPU activity, with NaN for an unknown one.

    Ranks whose GPU this rank has not read have zeros, as another rank reports them.
    """
    rows = np.zeros((len(_GPU_FIGURES), ranks.world_size))
    for rank, activity in activity_by_rank.items():
        rows[:, rank] = [
            math.nan if figure is None else figure for figure in astuple(activity)
        ]
    flat: list[float] = rows.ravel().tolist()
    return flat


def _mean_squares(samples: Sequence[NoiseSample], device: torch.device) -> torch.Tensor:
    """Return the mean squared norms of part and whole gradients, shape (2,).

    They stay on the device; both are 0 without samples.
    """
    if not samples:
        return torch.zeros(2, dtype=torch.float64, device=device)
    parts = torch.stack([sample.part_square for sample in samples])
    wholes = torch.stack([sample.whole_square for sample in samples])
    return torch.stack([parts.mean(), wholes.mean()])


def table_by_rank(sums: torch.Tensor) -> torch.Tensor:
    """Return the table in the sums, a view of shape (``_ROWS_BY_RANK``, ranks)."""
    return sums[_NUMBER_OF_TOTALS:].view(_ROWS_BY_RANK, -1)


def unpack_sums(sums: torch.Tensor) -> IntervalSums:
    """Return the metrics of all ranks from the sum of their ``pack_sums``."""
    totals = sums[:_NUMBER_OF_TOTALS].tolist()
    non_padding_tokens, padded_tokens, flops, part_square, whole_square = totals
    table = table_by_rank(sums)
    compute_s, data_wait_s, memory_bytes = table[:_ROWS_BEFORE_GPUS].tolist()
    gpu_rows = table[_ROWS_BEFORE_GPUS:]
    # NaN if a figure is unknown for all GPUs.
    gpu_means = torch.nanmean(gpu_rows, dim=1).tolist()
    return IntervalSums(
        non_padding_tokens=non_padding_tokens,
        padded_tokens=padded_tokens,
        flops=flops,
        part_square=part_square,
        whole_square=whole_square,
        compute_by_rank_s=compute_s,
        data_wait_by_rank_s=data_wait_s,
        peak_memory_by_rank_bytes=memory_bytes,
        gpu_activity=GpuActivity(
            **{
                name: mean if math.isfinite(mean) else None
                for name, mean in zip(_GPU_FIGURES, gpu_means, strict=True)
            }
        ),
        gpu_busy_by_rank=gpu_rows[_GPU_FIGURES.index("busy_share")].tolist(),
    )
