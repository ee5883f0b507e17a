"""Metrics between two logged steps: time and its breakdown, tokens, memory.

Metrics are summed over ranks on the device and copied to the host while the next step
runs, so they lag by one step. Each interval between two logged steps becomes one row of
``steps.jsonl``.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

import numpy as np
import torch

from trainer.data.data_wait import DataWait
from trainer.data.micro_batch import MicroBatch
from trainer.distributed.device_events import DeviceEvent, mark, to_device, to_host
from trainer.distributed.ranks import Ranks
from trainer.distributed.step import StepResult
from trainer.health.events import Action, Diagnosis, Kind
from trainer.model.flops import ModelWork
from trainer.record.run_record import StepRow

SMOOTHING = 0.9
"""Weight of the old value in each update: single estimates are noisy, and their ratio
is biased."""


class NoiseScale:
    """Gradient noise scale: the batch size above which larger batches hardly help.

    The expected squared norm of a mean gradient over B tokens is G² + S / B: that of
    the true gradient, plus noise. Two batch sizes give G² and S (McCandlish et al.
    2018, appendix A.1): here, the batch of one rank or one micro-batch, and that of the
    whole step. S / G² is the batch size at which both are equal. It ignores how the
    optimizer scales coordinates, so it indicates only the order of magnitude. Both
    parts are smoothed separately.
    """

    def __init__(self) -> None:
        self.parts = [0.0, 0.0]
        """Smoothed signal G² and noise S, which checkpoints store."""

    def update(
        self, whole_square: float, part_square: float, part_share: float, tokens: float
    ) -> None:
        """Add an estimate from the gradients of a step and of a part of it.

        Args:
            whole_square: Squared norm of the step's mean gradient.
            part_square: Squared norm of the part's mean gradient.
            part_share: Share of the step's tokens in the part, between 0 and 1.
            tokens: Tokens of the step.
        """
        if not (math.isfinite(whole_square) and math.isfinite(part_square)):
            return  # a skipped step
        signal = (whole_square - part_share * part_square) / (1 - part_share)
        noise = (part_square - whole_square) * tokens * part_share / (1 - part_share)
        # Both start from nothing and are too small at first by the same factor, which
        # the ratio does not see.
        self.parts = [
            SMOOTHING * old + (1 - SMOOTHING) * new
            for old, new in zip(self.parts, (signal, noise), strict=True)
        ]

    @property
    def tokens(self) -> float | None:
        """Noise scale in tokens; None if unknown, or if noise hides the signal."""
        signal, noise = self.parts
        return noise / signal if min(signal, noise) > 0 else None


STARVED_SHARE = 0.1
"""Data-loading stall as a share of step time, above which faster data loading is worth
the effort."""
STRAGGLER_RATIO = 1.25
"""Ratio of a rank's compute time to the median rank, above which it exceeds the usual
spread of GPUs and data."""
STREAK_ROWS = 5
"""Consecutive bad rows before a warning, and good ones before another: single rows are
often disturbed."""


class PaceMonitor:
    """Monitor of data loading and stragglers, for every logged row in order."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts = hosts
        self._rows = 0
        self._starved = _Streak()
        self._slow: defaultdict[int, _Streak] = defaultdict(_Streak)

    def check(
        self,
        *,
        step_s: float,
        data_wait_s: Sequence[float],
        compute_s: Sequence[float | None],
    ) -> list[Diagnosis]:
        """Return the findings of a row.

        Args:
            step_s: Time per step, in seconds.
            data_wait_s: Each rank's data wait per step, in seconds.
            compute_s: Each rank's compute time per step, in seconds; None if unknown.
        """
        self._rows += 1
        return [
            *self._check_data_loading(step_s, data_wait_s),
            *self._check_stragglers(compute_s),
        ]

    def _check_data_loading(
        self, step_s: float, data_wait_s: Sequence[float]
    ) -> list[Diagnosis]:
        """Return a finding if a rank waited for data in ``STREAK_ROWS`` rows."""
        # DataLoader workers are still starting in the first rows.
        if self._rows <= STREAK_ROWS or step_s <= 0 or not data_wait_s:
            return []
        wait_s = max(data_wait_s)
        share = wait_s / step_s
        if not self._starved.add(is_bad=share > STARVED_SHARE):
            return []
        rank = data_wait_s.index(wait_s)
        return [
            Diagnosis(
                kind=Kind.STARVED,
                action=Action.WARN,
                message=(
                    f"{self._named(rank)} waits for data {share:.0%} of the time:"
                    f" {wait_s:.4g} of {step_s:.4g} s per step"
                ),
                values={
                    "rank": float(rank),
                    "share": share,
                    "data_wait_s": wait_s,
                    "step_s": step_s,
                },
            )
        ]

    def _check_stragglers(self, compute_s: Sequence[float | None]) -> list[Diagnosis]:
        """Return a finding on the slowest rank that was slow in ``STREAK_ROWS`` rows.

        It names the other such ranks.
        """
        known_s = [seconds for seconds in compute_s if seconds is not None]
        median_s = median_low(known_s) if known_s else 0.0
        if len(known_s) < len(compute_s) or median_s <= 0:
            return []
        ratios = [seconds / median_s for seconds in known_s]
        slow_ranks = [
            rank
            for rank, ratio in enumerate(ratios)
            if self._slow[rank].add(is_bad=ratio > STRAGGLER_RATIO)
        ]
        if not slow_ranks:
            return []
        slowest = max(slow_ranks, key=ratios.__getitem__)
        message = (
            f"{self._named(slowest)} takes {ratios[slowest]:.2f} times the compute time"
            f" of the median rank: {known_s[slowest]:.4g} instead of {median_s:.4g} s"
            " per step; all others wait for it"
        )
        others = [str(rank) for rank in slow_ranks if rank != slowest]
        if others:
            message += f" (also slow: {', '.join(others)})"
        return [
            Diagnosis(
                kind=Kind.STRAGGLER,
                action=Action.WARN,
                message=message,
                values={
                    "rank": float(slowest),
                    "ratio": ratios[slowest],
                    "compute_s": known_s[slowest],
                    "median_s": median_s,
                },
            )
        ]

    def _named(self, rank: int) -> str:
        """Return a rank with its host, if known."""
        if rank < len(self._hosts):
            return f"rank {rank} ({self._hosts[rank][:64]})"
        return f"rank {rank}"


class _Streak:
    """Counter of consecutive bad rows.

    It triggers a warning after ``STREAK_ROWS`` of them, and another only after
    ``STREAK_ROWS`` good rows have followed.
    """

    def __init__(self) -> None:
        self._bad_rows = 0
        self._good_rows = 0
        self._warned = False

    def add(self, *, is_bad: bool) -> bool:
        """Count a row; return whether to warn."""
        if is_bad:
            self._bad_rows += 1
            self._good_rows = 0
        else:
            self._bad_rows = 0
            self._good_rows += 1
        had_warned = self._warned and self._good_rows < STREAK_ROWS
        self._warned = had_warned or self._bad_rows >= STREAK_ROWS
        return self._warned and not had_warned


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """One rank's means per step in an interval, in seconds."""

    step_s: float
    compute_s: float | None
    """None if compute and communication cannot be told apart."""
    data_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoiseSample:
    """Gradients of one step for the gradient noise scale; tensors of shape ()."""

    part_share: float
    """Share of the step's tokens in the part."""
    part_square: torch.Tensor
    """Squared norm of the part's mean gradient."""
    whole_square: torch.Tensor
    """Squared norm of the whole step's mean gradient."""


@dataclass(slots=True, kw_only=True)
class _Interval:
    """Metrics of one rank since the last logged step.

    Once closed, also those being copied to the host.
    """

    began: DeviceEvent
    results: list[StepResult] = field(default_factory=list)
    non_padding_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    noise_samples: list[_NoiseSample] = field(default_factory=list)
    other_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the row that the training loop knows."""
    data_wait_s: float = 0.0
    previous_pace: _Pace | None = None
    """This rank's pace in the last interval that was read before this one closed."""
    ended: DeviceEvent = field(init=False)
    fetched: Sequence[torch.Tensor] = ()
    """Host copies of the sums over ranks, the loss and the gradient norm."""
    copied: DeviceEvent = field(init=False)


_TOTALS = 5
"""Number of totals at the beginning of the sums, before the entries of each rank."""


class Meter:
    """Meter of training steps, which produces the rows of ``steps.jsonl``.

    ``peak_flops_per_s`` is of one device.
    """

    def __init__(
        self,
        work: ModelWork,
        ranks: Ranks,
        *,
        peak_flops_per_s: float | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self._work = work
        self._ranks = ranks
        self._peak_flops_per_s = peak_flops_per_s
        self.noise = NoiseScale()
        self._monitor = PaceMonitor(hosts)
        self._pace: _Pace | None = None
        self._diagnoses: list[Diagnosis] = []
        self._pending: deque[_Interval] = deque()
        self._data_wait = DataWait(lambda: mark(ranks.device))
        self.take = self._data_wait.take
        """Function that takes micro-batches from a loader and counts the time that the
        device was idle meanwhile."""
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now, and discard one that was not closed."""
        self._interval = _Interval(began=mark(self._ranks.device))
        self._data_wait.take_waited_s()

    def discard(self) -> None:
        """Restart, and discard intervals that were not read: their steps are undone."""
        self._pending.clear()
        self.restart()

    def take_diagnoses(self) -> list[Diagnosis]:
        """Return the findings of rows since the last call, the same on every rank."""
        diagnoses = self._diagnoses
        self._diagnoses = []
        return diagnoses

    @property
    def open_steps(self) -> int:
        """Number of steps since the last logged one."""
        return len(self._interval.results)

    def add(self, batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Count a step that was submitted to the device."""
        interval = self._interval
        for batch in batches:
            lengths = batch.tokens_N.numpy().astype(np.int64)
            interval.non_padding_tokens += batch.non_padding_tokens
            interval.padded_tokens += batch.ids_BS.numel()
            interval.flops += self._work.step_flops(lengths, batch.predicted_tokens)
        interval.results.append(result)
        self._data_wait.device_busy_until(result.updated)
        if result.partial is not None:
            interval.noise_samples.append(
                _NoiseSample(
                    part_share=result.partial.share,
                    part_square=result.partial.square.double(),
                    whole_square=result.grad_norm.square().double(),
                )
            )

    def close(self, step: int, **other_fields: float) -> None:
        """End the interval, and start to copy its metrics to the host.

        ``other_fields`` are further fields of its row.
        """
        device = self._ranks.device
        interval = self._interval
        interval.other_fields = {"step": step, **other_fields}
        interval.previous_pace = self._pace
        interval.data_wait_s = self._data_wait.take_waited_s() / len(interval.results)
        interval.ended = mark(device)
        sums = self._own_sums(interval)
        self._ranks.all_reduce_async(sums)()
        last = interval.results[-1]
        interval.fetched = [
            to_host(tensor) for tensor in (sums, last.loss, last.grad_norm)
        ]
        interval.copied = mark(device)
        self._pending.append(interval)
        self.restart()

    def _own_sums(self, interval: _Interval) -> torch.Tensor:
        """Return this rank's metrics to be summed over ranks, fp64, on the device.

        Five totals: non-padding tokens, padded tokens, FLOPs, and the means over steps
        of the squared norms of the part's and the whole gradient. They are followed by,
        for each rank, its compute time and its data wait per step in the previous
        interval, in seconds, and its peak memory in bytes.
        """
        device = self._ranks.device
        totals = [interval.non_padding_tokens, interval.padded_tokens, interval.flops]
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        if interval.noise_samples:
            samples = interval.noise_samples
            parts = torch.stack([sample.part_square for sample in samples])
            wholes = torch.stack([sample.whole_square for sample in samples])
            squares = torch.stack([parts.mean(), wholes.mean()])
        # Only this rank's own entries; all others are zero, so that the sum over ranks
        # has every rank's.
        per_rank = np.zeros((3, self._ranks.world_size))
        rank = self._ranks.rank
        pace = interval.previous_pace
        if pace is not None:
            # If the compute time is unknown (NaN) on one rank, it is on all.
            per_rank[0, rank] = math.nan if pace.compute_s is None else pace.compute_s
            per_rank[1, rank] = pace.data_wait_s
        per_rank[2, rank] = _peak_memory_bytes(device)
        return torch.cat(
            [
                to_device(totals, device),
                squares,
                to_device(per_rank.ravel().tolist(), device),
            ]
        )

    def rows(self, *, wait_for_all: bool = False) -> Iterator[StepRow]:
        """Yield rows that have arrived, the same on every rank except times.

        ``wait_for_all`` waits for the last one.
        """
        # On a GPU the latest row waits: the device still computes it, and needs its
        # next step meanwhile.
        keeps_latest = self._ranks.device.type == "cuda" and not wait_for_all
        unread = 1 if keeps_latest else 0
        while len(self._pending) > unread:
            yield self._read(self._pending.popleft())

    def _read(self, interval: _Interval) -> StepRow:
        """Return the row of a closed interval, once its metrics are on the host."""
        interval.copied.wait()
        world_size = self._ranks.world_size
        steps = len(interval.results)
        sums, loss, grad_norm = interval.fetched
        totals = sums[:_TOTALS].tolist()
        non_padding_tokens, padded_tokens, flops, part_square, whole_square = totals
        per_rank = sums[_TOTALS:].reshape(3, world_size).tolist()
        compute_by_rank_s, data_wait_by_rank_s, peak_memory_by_rank_bytes = per_rank
        pace_fields = self._check_pace(
            interval.previous_pace, compute_by_rank_s, data_wait_by_rank_s
        )
        times = _step_times(interval.results, world_size)
        seconds = interval.ended.seconds_since(interval.began)
        step_s = seconds / steps
        self._pace = _Pace(
            step_s=step_s,
            compute_s=None if times.communication_s is None else times.compute_s,
            data_wait_s=interval.data_wait_s,
        )
        if interval.noise_samples:
            part_share = fmean(sample.part_share for sample in interval.noise_samples)
            if 0 < part_share < 1:
                self.noise.update(
                    whole_square / world_size,
                    part_square / world_size,
                    part_share,
                    non_padding_tokens / steps,
                )
        flops_per_s = flops / seconds / world_size
        # The 6 N convention of Kaplan et al. 2020: all parameters for every token,
        # without attention.
        six_n_per_s = (
            6 * self._work.parameters * non_padding_tokens / seconds / world_size
        )
        peak = self._peak_flops_per_s
        return StepRow(
            **interval.other_fields,
            loss=_finite(loss.item()),
            grad_norm=_finite(grad_norm.item()),
            step_s=step_s,
            data_wait_s=interval.data_wait_s,
            compute_s=times.compute_s,
            communication_s=times.communication_s,
            optimizer_s=times.optimizer_s,
            non_padding_tokens=round(non_padding_tokens / steps),
            padded_tokens=round(padded_tokens / steps),
            tokens_per_s=non_padding_tokens / seconds,
            packing_efficiency=non_padding_tokens / max(1.0, padded_tokens),
            tokens_per_s_per_rank=non_padding_tokens / seconds / world_size,
            padded_tokens_per_s=padded_tokens / seconds,
            padded_tokens_per_s_per_rank=padded_tokens / seconds / world_size,
            model_flops_per_s_per_rank=flops_per_s,
            mfu=flops_per_s / peak if peak else None,
            mfu_6n=six_n_per_s / peak if peak else None,
            peak_memory_bytes=round(max(peak_memory_by_rank_bytes)),
            gradient_noise_scale_tokens=self.noise.tokens,
            **pace_fields,
        )

    def _check_pace(
        self,
        pace: _Pace | None,
        compute_by_rank_s: Sequence[float],
        data_wait_by_rank_s: Sequence[float],
    ) -> dict[str, Any]:
        """Check all ranks' times of the previous interval.

        Returns:
            The row's fields about them, as far as known.
        """
        fields: dict[str, Any] = {"slowest_rank": None, "slowest_rank_ratio": None}
        if pace is None:
            return fields
        compute_s = [_finite(seconds) for seconds in compute_by_rank_s]
        self._diagnoses += self._monitor.check(
            step_s=pace.step_s, data_wait_s=data_wait_by_rank_s, compute_s=compute_s
        )
        world_size = self._ranks.world_size
        if world_size == 1:
            return fields
        waiting = max(range(world_size), key=data_wait_by_rank_s.__getitem__)
        fields["longest_data_wait_s"] = data_wait_by_rank_s[waiting]
        fields["longest_data_wait_rank"] = waiting
        known_s = [seconds for seconds in compute_s if seconds is not None]
        if len(known_s) < world_size or min(known_s) <= 0:
            return fields
        slowest = max(range(world_size), key=known_s.__getitem__)
        fields["slowest_rank"] = slowest
        fields["slowest_rank_ratio"] = known_s[slowest] / median_low(known_s)
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTimes:
    """Means per step on this rank, in seconds."""

    compute_s: float
    communication_s: float | None
    """None if compute and communication cannot be told apart."""
    optimizer_s: float


def _step_times(results: Sequence[StepResult], world_size: int) -> _StepTimes:
    """Break down the time of steps, whose events the device has reached."""
    counting_s = fmean(
        result.count_received.seconds_since(result.count_requested)
        for result in results
    )
    # Gradients are sent while others are still computed: compute lasts until the last
    # of them are sent, or, if that moment is unknown, until all are reduced.
    computed = [result.departed or result.reduced for result in results]
    until_computed_s = fmean(
        event.seconds_since(result.began)
        for event, result in zip(computed, results, strict=True)
    )
    communication_s: float | None = None
    if world_size == 1:
        communication_s = 0.0
    elif all(result.departed for result in results):
        communication_s = counting_s + fmean(
            result.reduced.seconds_since(event)
            for event, result in zip(computed, results, strict=True)
        )
    return _StepTimes(
        compute_s=until_computed_s - counting_s,
        communication_s=communication_s,
        optimizer_s=fmean(
            result.updated.seconds_since(result.reduced) for result in results
        ),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: reserved by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # Not getrusage's peak, which is inherited from the parent process.
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """Return a figure of this process's ``/proc/self/status``, such as ``VmPeak``."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(match[1]) * 1024
