"""Meter of training steps: time and its breakdown, tokens, rates, memory.

Metrics are summed over ranks on the device and copied to the host while the next step
runs, so they lag by one step. Each interval between two logged steps becomes one row of
``steps.jsonl``.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import Any

import torch

from trainer.data.micro_batch import MicroBatch
from trainer.distributed.step import StepResult
from trainer.formats.run_record import StepRow
from trainer.health.findings import Finding
from trainer.model.flops import ModelWork
from trainer.record.gpu_reader import GpuReader
from trainer.record.interval import (
    Interval,
    IntervalSums,
    Pace,
    pack_sums,
    unpack_sums,
)
from trainer.record.noise_scale import NoiseScale
from trainer.record.pace_monitor import PaceMonitor
from trainer.runtime.data_wait import DataWait
from trainer.runtime.device_events import DeviceEvent, mark, to_host
from trainer.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClosedInterval:
    """Interval that has ended, whose metrics are being copied to the host."""

    interval: Interval
    ended: DeviceEvent
    """Event after the last step."""
    data_wait_s: float
    """Data wait of this rank per step."""
    previous_pace: Pace | None
    """Pace that this rank has packed into ``sums``: that of the last interval that was
    read before this one closed; None in the first."""
    other_fields: dict[str, Any]
    """Fields of the ``StepRow`` that the meter does not measure, by name."""
    sums: torch.Tensor
    """Sums over ranks, on the host, as ``pack_sums`` arranges them."""
    loss: torch.Tensor
    """Loss of the last step, on the host, of shape ()."""
    grad_norm: torch.Tensor
    """Gradient norm of the last step, on the host, of shape ()."""
    copied: DeviceEvent
    """Event after which ``sums``, ``loss`` and ``grad_norm`` are complete."""


class Meter:
    """Measures training steps, and produces the rows of ``steps.jsonl``.

    Args:
        work: FLOPs and parameters of the model.
        ranks: This rank, and the number of all.
        gpu_reader: Reader of the GPUs whose activity this rank reports.
        peak_flops_per_s: Dense peak of one device; None if unknown.
        hosts: Host of each rank, for messages; empty if unknown.
    """

    def __init__(
        self,
        work: ModelWork,
        ranks: Ranks,
        gpu_reader: GpuReader,
        *,
        peak_flops_per_s: float | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        self._work = work
        self._ranks = ranks
        self._gpu_reader = gpu_reader
        self._peak_flops_per_s = peak_flops_per_s
        self.noise = NoiseScale()
        """Gradient noise scale of the steps so far."""
        self._monitor = PaceMonitor(hosts)
        self._pace: Pace | None = None
        self._findings: list[Finding] = []
        self._unread: deque[_ClosedInterval] = deque()
        self._data_wait = DataWait(lambda: mark(ranks.device))
        self.take = self._data_wait.take
        """Function that takes micro-batches from a loader, and measures how long the
        device is idle meanwhile."""
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now, and discard one that was not closed."""
        self._interval = Interval(began=mark(self._ranks.device))
        self._data_wait.take_waited_s()
        self._gpu_reader.take()

    def discard(self) -> None:
        """Discard the open interval and all unread ones, as their steps are undone."""
        self._unread.clear()
        self.restart()

    def take_findings(self) -> list[Finding]:
        """Return the findings since the last call, which are the same on every rank."""
        findings = self._findings
        self._findings = []
        return findings

    @property
    def open_steps(self) -> int:
        """Number of steps since the last logged one."""
        return len(self._interval.results)

    def add(self, batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Count a step that was submitted to the device."""
        self._interval.add(batches, result, self._work)
        self._data_wait.device_busy_until(result.updated)

    def close(self, step: int, **other_fields: float) -> None:
        """End the interval, and start to copy its metrics to the host.

        Args:
            step: Finished optimizer steps.
            other_fields: Fields of the ``StepRow`` that the meter does not measure,
                such as ``learning_rate``.
        """
        interval = self._interval
        data_wait_s = self._data_wait.take_waited_s() / len(interval.results)
        ended = mark(self._ranks.device)
        sums = pack_sums(interval, self._pace, self._gpu_reader.take(), self._ranks)
        wait_for_sums = self._ranks.all_reduce_async(sums)
        wait_for_sums()
        sums_on_host = to_host(sums)
        last_result = interval.results[-1]
        loss_on_host = to_host(last_result.loss)
        grad_norm_on_host = to_host(last_result.grad_norm)
        self._unread.append(
            _ClosedInterval(
                interval=interval,
                ended=ended,
                data_wait_s=data_wait_s,
                previous_pace=self._pace,
                other_fields={"step": step, **other_fields},
                sums=sums_on_host,
                loss=loss_on_host,
                grad_norm=grad_norm_on_host,
                copied=mark(self._ranks.device),
            )
        )
        self.restart()

    def take_rows(self, *, wait_for_all: bool = False) -> Iterator[StepRow]:
        """Yield the row of each closed interval since the last call.

        Rows are the same on every rank, except times.

        On a GPU, the row of the latest interval is left for the next call, unless
        ``wait_for_all``.
        """
        # To read the latest row is to wait for the device, which still computes the
        # interval, and must get its next step meanwhile.
        keeps_latest = self._ranks.device.type == "cuda" and not wait_for_all
        rows_to_keep = 1 if keeps_latest else 0
        while len(self._unread) > rows_to_keep:
            yield self._read(self._unread.popleft())

    def _read(self, closed: _ClosedInterval) -> StepRow:
        """Return the row of a closed interval, once its metrics are on the host."""
        closed.copied.wait()
        sums = unpack_sums(closed.sums)
        world_size = self._ranks.world_size
        if closed.previous_pace is not None:
            self._diagnose(closed.previous_pace, sums)
        times = _step_times(closed.interval.results, world_size)
        seconds = closed.ended.seconds_since(closed.interval.began)
        steps = len(closed.interval.results)
        self._pace = Pace(
            step_s=seconds / steps,
            compute_s=None if times.communication_s is None else times.compute_s,
            data_wait_s=closed.data_wait_s,
        )
        self._update_noise(closed.interval, sums)
        tokens_per_s = sums.non_padding_tokens / seconds
        padded_tokens_per_s = sums.padded_tokens / seconds
        flops_per_s_per_rank = sums.flops / seconds / world_size
        # The 6 N convention of Kaplan et al. 2020: all parameters for every token,
        # without attention.
        six_n_flops = 6 * self._work.parameters * sums.non_padding_tokens
        slowest_rank, slowest_rank_ratio = _slowest_rank(sums)
        longest_wait_rank, longest_wait_s = _longest_data_wait(
            closed.previous_pace, sums
        )
        gpus = sums.gpu_activity
        lowest_busy_rank, lowest_busy_share = _lowest_gpu_busy(sums)
        return StepRow(
            **closed.other_fields,
            loss=_finite(closed.loss.item()),
            grad_norm=_finite(closed.grad_norm.item()),
            step_s=seconds / steps,
            data_wait_s=closed.data_wait_s,
            compute_s=times.compute_s,
            communication_s=times.communication_s,
            optimizer_s=times.optimizer_s,
            non_padding_tokens=round(sums.non_padding_tokens / steps),
            padded_tokens=round(sums.padded_tokens / steps),
            tokens_per_s=tokens_per_s,
            packing_efficiency=sums.non_padding_tokens / max(1.0, sums.padded_tokens),
            tokens_per_s_per_rank=tokens_per_s / world_size,
            padded_tokens_per_s=padded_tokens_per_s,
            padded_tokens_per_s_per_rank=padded_tokens_per_s / world_size,
            model_flops_per_s_per_rank=flops_per_s_per_rank,
            mfu=self._share_of_peak(flops_per_s_per_rank),
            mfu_6n=self._share_of_peak(six_n_flops / seconds / world_size),
            peak_memory_bytes=round(max(sums.peak_memory_by_rank_bytes)),
            gradient_noise_scale_tokens=self.noise.tokens,
            slowest_rank=slowest_rank,
            slowest_rank_ratio=slowest_rank_ratio,
            longest_data_wait_s=longest_wait_s,
            longest_data_wait_rank=longest_wait_rank,
            gpu_busy_share=gpus.busy_share,
            lowest_gpu_busy_share=lowest_busy_share,
            lowest_gpu_busy_rank=lowest_busy_rank,
            memory_busy_share=gpus.memory_busy_share,
            sm_active_share=gpus.sm_active_share,
            tensor_active_share=gpus.tensor_active_share,
            dram_active_share=gpus.dram_active_share,
            gpu_power_w=gpus.power_w,
            sm_clock_mhz=gpus.sm_clock_mhz,
        )

    def _share_of_peak(self, flops_per_s: float) -> float | None:
        """Return a rate as a share of the device's peak; None if that is unknown."""
        if not self._peak_flops_per_s:
            return None
        return flops_per_s / self._peak_flops_per_s

    def _update_noise(self, interval: Interval, sums: IntervalSums) -> None:
        """Add the interval's gradients to the gradient noise scale."""
        if not interval.noise_samples:
            return
        part_share = fmean(sample.part_share for sample in interval.noise_samples)
        # A part without tokens, or with all of them, says nothing about noise.
        if 0 < part_share < 1:
            self.noise.update(
                whole_square=sums.whole_square / self._ranks.world_size,
                part_square=sums.part_square / self._ranks.world_size,
                part_share=part_share,
                tokens=sums.non_padding_tokens / len(interval.results),
            )

    def _diagnose(self, pace: Pace, sums: IntervalSums) -> None:
        """Check the previous interval for slow data loading and stragglers.

        Args:
            pace: This rank's pace in that interval.
            sums: Sums with all ranks' times in that interval.
        """
        self._findings += self._monitor.check(
            step_s=pace.step_s,
            data_wait_s=sums.data_wait_by_rank_s,
            compute_s=[_finite(seconds) for seconds in sums.compute_by_rank_s],
        )


def _longest_data_wait(
    pace: Pace | None, sums: IntervalSums
) -> tuple[int | None, float | None]:
    """Return the rank with the longest data wait, and that wait in seconds.

    Both are None on a single rank, and in the first row: it has no interval before it,
    so that ``pace`` is None.
    """
    waits_s = sums.data_wait_by_rank_s
    if pace is None or len(waits_s) == 1:
        return None, None
    longest_wait_s = max(waits_s)
    return waits_s.index(longest_wait_s), longest_wait_s


def _slowest_rank(sums: IntervalSums) -> tuple[int | None, float | None]:
    """Return the slowest rank, and the ratio of its compute time to the median rank's.

    Both are None on a single rank, if a compute time is unknown (NaN), and in the first
    row, in which all compute times are 0.
    """
    compute_s = sums.compute_by_rank_s
    are_known = all(math.isfinite(seconds) and seconds > 0 for seconds in compute_s)
    if len(compute_s) == 1 or not are_known:
        return None, None
    slowest_s = max(compute_s)
    return compute_s.index(slowest_s), slowest_s / median_low(compute_s)


def _lowest_gpu_busy(sums: IntervalSums) -> tuple[int | None, float | None]:
    """Return the rank whose GPU was busy for the least share of time, and that share.

    Both are None if no GPU was read.
    """
    shares = sums.gpu_busy_by_rank
    known_ranks = [rank for rank, share in enumerate(shares) if math.isfinite(share)]
    if not known_ranks:
        return None, None
    lowest_rank = min(known_ranks, key=shares.__getitem__)
    return lowest_rank, shares[lowest_rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepTimes:
    """Means per step on this rank, in seconds."""

    compute_s: float
    """Time of forward and backward; with communication, if that is unknown."""
    communication_s: float | None
    """None if compute and communication cannot be told apart."""
    optimizer_s: float
    """Time of clipping and the update."""


def _step_times(results: Sequence[StepResult], world_size: int) -> _StepTimes:
    """Break down the time of steps whose events the device has reached."""
    counting_s = fmean(
        result.count_received.seconds_since(result.count_requested)
        for result in results
    )
    # Gradients are sent while others are still computed, so compute lasts until the
    # last ones depart; if that moment is unknown, until all gradients are reduced.
    computed = [result.gradients_sent or result.reduced for result in results]
    until_computed_s = fmean(
        event.seconds_since(result.began)
        for event, result in zip(computed, results, strict=True)
    )
    communication_s: float | None = None
    if world_size == 1:
        communication_s = 0.0
    elif all(result.gradients_sent for result in results):
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
