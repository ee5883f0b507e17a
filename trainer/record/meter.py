"""Metrics between two logged steps: time and its breakdown, tokens, memory.

Metrics are summed over ranks on the device and copied to the host while the next step
runs, so they lag by one step.
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

from trainer.data.loader import DataWait, MicroBatch
from trainer.distributed.ranks import DeviceEvent, Ranks, mark, to_device, to_host
from trainer.distributed.step import StepResult
from trainer.health.events import Action, Diagnosis, Kind
from trainer.model.flops import ModelWork
from trainer.record.run_record import StepRow

SMOOTHING = 0.9
"""Weight of the old value in each update: single estimates are noisy, and their ratio
is biased."""


class NoiseScale:
    """Gradient noise scale: the batch size above which a larger batch hardly improves the gradient.

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
        """Add an estimate from squared norms of mean gradients, of all ``tokens`` and a share of them in (0, 1)."""
        if not (math.isfinite(whole_square) and math.isfinite(part_square)):
            return  # a skipped step
        signal = (whole_square - part_share * part_square) / (1 - part_share)
        noise = (part_square - whole_square) * tokens * part_share / (1 - part_share)
        # Both start from nothing and are too small at first by the same factor, which
        # the ratio does not see.
        new = (signal, noise)
        self.parts = [
            SMOOTHING * old + (1 - SMOOTHING) * one
            for old, one in zip(self.parts, new, strict=True)
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
ROWS = 5
"""Consecutive bad rows before a warning, and good ones before another: single rows are
often disturbed."""


class PaceMonitor:
    """Monitor of data loading and stragglers, for every logged row in order."""

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        self._hosts, self._rows, self._starved = hosts, 0, _Streak()
        self._slow: defaultdict[int, _Streak] = defaultdict(_Streak)

    def look(
        self,
        *,
        step_s: float,
        data_wait_s: Sequence[float],
        compute_s: Sequence[float | None],
    ) -> list[Diagnosis]:
        """Return the findings of a row from its step time, and each rank's data wait and compute time if known."""
        self._rows += 1
        return [*self._starvation(step_s, data_wait_s), *self._stragglers(compute_s)]

    def _starvation(
        self, step_s: float, data_wait_s: Sequence[float]
    ) -> list[Diagnosis]:
        # DataLoader workers are still starting in the first rows.
        if self._rows <= ROWS or step_s <= 0 or not data_wait_s:
            return []
        wait_s = max(data_wait_s)
        share = wait_s / step_s
        if not self._starved.look(share > STARVED_SHARE):
            return []
        rank = data_wait_s.index(wait_s)
        waits = f"{self._named(rank)} waits for data {share:.0%} of the time"
        message = f"{waits}: {wait_s:.4g} of {step_s:.4g} s per step"
        values = {
            "rank": float(rank),
            "share": share,
            "data_wait_s": wait_s,
            "step_s": step_s,
        }
        return [
            Diagnosis(
                kind=Kind.STARVED, action=Action.WARN, message=message, values=values
            )
        ]

    def _stragglers(self, compute_s: Sequence[float | None]) -> list[Diagnosis]:
        """Return a finding on the slowest rank that was slow for ``ROWS`` rows, and the other such ranks."""
        known_s = [seconds for seconds in compute_s if seconds is not None]
        median_s = median_low(known_s) if known_s else 0.0
        if len(known_s) < len(compute_s) or median_s <= 0:
            return []
        ratios = [seconds / median_s for seconds in known_s]
        told = [
            rank
            for rank, ratio in enumerate(ratios)
            if self._slow[rank].look(ratio > STRAGGLER_RATIO)
        ]
        if not told:
            return []
        slowest = max(told, key=ratios.__getitem__)
        others = ", ".join(str(rank) for rank in told if rank != slowest)
        message = (
            f"{self._named(slowest)} takes {ratios[slowest]:.2f} times the compute time"
            " of the median rank: "
        )
        message += (
            f"{known_s[slowest]:.4g} instead of {median_s:.4g} s per step; all others"
            " wait for it"
        )
        message += f" (also slow: {others})" if others else ""
        values = {
            "rank": float(slowest),
            "ratio": ratios[slowest],
            "compute_s": known_s[slowest],
            "median_s": median_s,
        }
        return [
            Diagnosis(
                kind=Kind.STRAGGLER, action=Action.WARN, message=message, values=values
            )
        ]

    def _named(self, rank: int) -> str:
        return (
            f"rank {rank} ({self._hosts[rank][:64]})"
            if rank < len(self._hosts)
            else f"rank {rank}"
        )


class _Streak:
    """Counter that triggers a warning after ``ROWS`` bad rows, once until ``ROWS`` good rows have followed."""

    def __init__(self) -> None:
        self._bad_rows = self._fine_rows = 0
        self._is_told = False

    def look(self, is_bad: bool) -> bool:
        self._bad_rows = self._bad_rows + 1 if is_bad else 0
        self._fine_rows = 0 if is_bad else self._fine_rows + 1
        was_told = self._is_told and self._fine_rows < ROWS
        self._is_told = was_told or self._bad_rows >= ROWS
        return self._is_told and not was_told


_FIELDS = (
    "non_padding_tokens",
    "padded_tokens",
    "flops",
    "part_square",
    "whole_square",
)
"""Metrics summed over ranks, in this order; the squares are means over the interval's
steps. They are followed by, for each rank, its compute time and data wait per step in
the previous interval, in seconds, and its peak memory."""


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
    partials: list[tuple[float, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )
    """For each step: share of tokens in the part, squared norm of the part's gradient,
    and of the whole gradient."""
    known: dict[str, Any] = field(default_factory=dict)
    data_wait_s: float = 0.0
    pace: tuple[float, float | None, float] | None = None
    """This rank's seconds per step in the last interval read before: wall time,
    compute, data wait."""
    ended: DeviceEvent = field(init=False)
    fetched: Sequence[torch.Tensor] = ()
    """Host copies of the sums over ranks, the loss and the gradient norm."""
    copied: DeviceEvent = field(init=False)


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
        self._work, self._peak, self._ranks = work, peak_flops_per_s, ranks
        self.noise, self._monitor = NoiseScale(), PaceMonitor(hosts)
        self._pace: tuple[float, float | None, float] | None = None
        self._findings: list[Diagnosis] = []
        self._pending: deque[_Interval] = deque()
        self._wait = DataWait(lambda: mark(ranks.device))
        self.take = self._wait.take
        """Function that takes micro-batches from a loader and counts the time that the
        device was idle meanwhile."""
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now, and discard one that was not closed."""
        self._interval = _Interval(began=mark(self._ranks.device))
        self._wait.take_waited_s()

    def forget(self) -> None:
        """Restart, and discard rows that were not read, after their steps were rolled back."""
        self._pending.clear()
        self.restart()

    def take_diagnoses(self) -> list[Diagnosis]:
        """Return the findings of rows since the last call, the same on every rank."""
        found, self._findings = self._findings, []
        return found

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
        self._wait.device_busy_until(result.updated)
        if (part := result.partial) is not None:
            interval.partials.append(
                (part.share, part.square.double(), result.grad_norm.square().double())
            )

    def close(self, step: int, **known: float) -> None:
        """End the interval, and start to copy its metrics to the host.

        ``known`` are other fields of its row.
        """
        device, interval, world = (
            self._ranks.device,
            self._interval,
            self._ranks.world_size,
        )
        interval.known, interval.pace = {"step": step, **known}, self._pace
        interval.data_wait_s = self._wait.take_waited_s() / len(interval.results)
        interval.ended = mark(device)
        # Only this rank's own entries; all others are zero, so that the sum over ranks
        # has every rank's.
        of_ranks = np.zeros((3, world))
        # On a CPU not getrusage's peak, which is inherited from the parent process.
        peak_bytes = (
            torch.cuda.max_memory_reserved(device)
            if device.type == "cuda"
            else status_bytes("VmHWM")
        )
        of_ranks[2, self._ranks.rank] = peak_bytes
        if interval.pace is not None:
            # If the compute time is unknown (NaN) on one rank, it is on all.
            of_ranks[:2, self._ranks.rank] = interval.pace[1:]
        counts = [interval.non_padding_tokens, interval.padded_tokens, interval.flops]
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        if interval.partials:
            _, parts, wholes = zip(*interval.partials, strict=True)
            squares = torch.stack(
                [torch.stack(parts).mean(), torch.stack(wholes).mean()]
            )
        sums = torch.cat(
            [
                to_device(counts, device),
                squares,
                to_device(of_ranks.ravel().tolist(), device),
            ]
        )
        self._ranks.all_reduce_async(sums)()
        last = interval.results[-1]
        interval.fetched = [
            to_host(tensor) for tensor in (sums, last.loss, last.grad_norm)
        ]
        interval.copied = mark(device)
        self._pending.append(interval)
        self.restart()

    def rows(self, *, all_of_them: bool = False) -> Iterator[StepRow]:
        """Yield rows that have arrived, the same on every rank except times.

        ``all_of_them`` waits for the last one.
        """
        # On a GPU the latest row waits: the device still computes it, and needs its
        # next step meanwhile.
        left = 1 if self._ranks.device.type == "cuda" and not all_of_them else 0
        while len(self._pending) > left:
            yield self._read(self._pending.popleft())

    def _read(self, row: _Interval) -> StepRow:
        row.copied.wait()
        world, steps = self._ranks.world_size, len(row.results)
        numbers, loss, grad_norm = row.fetched
        sums = dict(zip(_FIELDS, numbers.tolist(), strict=False))
        computed_s, waits_s, peaks_bytes = (
            numbers[len(_FIELDS) :].reshape(3, world).tolist()
        )
        told = self._look_at_pace(row, computed_s, waits_s)
        seconds = row.ended.seconds_since(row.began)
        counting_s = fmean(
            one.count_received.seconds_since(one.count_requested) for one in row.results
        )
        sent = [(one, one.departed or one.reduced) for one in row.results]
        compute_s = (
            fmean(departed.seconds_since(one.began) for one, departed in sent)
            - counting_s
        )
        communication_s: float | None = 0.0 if world == 1 else None
        if world > 1 and all(one.departed for one in row.results):
            communication_s = counting_s + fmean(
                one.reduced.seconds_since(departed) for one, departed in sent
            )
        # Without the moment of departure, compute and communication cannot be told
        # apart.
        self._pace = (
            seconds / steps,
            None if communication_s is None else compute_s,
            row.data_wait_s,
        )
        if (
            row.partials
            and 0 < (share := fmean(share for share, _, _ in row.partials)) < 1
        ):
            tokens = sums["non_padding_tokens"] / steps
            self.noise.update(
                sums["whole_square"] / world, sums["part_square"] / world, share, tokens
            )
        flops_per_s = sums["flops"] / seconds / world
        # The 6 N convention of Kaplan et al. 2020: all parameters for every token,
        # without attention.
        six_n_per_s = (
            6 * self._work.parameters * sums["non_padding_tokens"] / seconds / world
        )
        return StepRow(
            **row.known,
            loss=_finite(loss.item()),
            grad_norm=_finite(grad_norm.item()),
            step_s=seconds / steps,
            data_wait_s=row.data_wait_s,
            compute_s=compute_s,
            communication_s=communication_s,
            optimizer_s=fmean(
                one.updated.seconds_since(one.reduced) for one in row.results
            ),
            non_padding_tokens=round(sums["non_padding_tokens"] / steps),
            padded_tokens=round(sums["padded_tokens"] / steps),
            tokens_per_s=sums["non_padding_tokens"] / seconds,
            packing_efficiency=sums["non_padding_tokens"]
            / max(1.0, sums["padded_tokens"]),
            tokens_per_s_per_rank=sums["non_padding_tokens"] / seconds / world,
            padded_tokens_per_s=sums["padded_tokens"] / seconds,
            padded_tokens_per_s_per_rank=sums["padded_tokens"] / seconds / world,
            model_flops_per_s_per_rank=flops_per_s,
            mfu=flops_per_s / self._peak if self._peak else None,
            mfu_6n=six_n_per_s / self._peak if self._peak else None,
            peak_memory_bytes=round(max(peaks_bytes)),
            gradient_noise_scale_tokens=self.noise.tokens,
            **told,
        )

    def _look_at_pace(
        self, row: _Interval, computed_s: Sequence[float], waits_s: Sequence[float]
    ) -> dict[str, Any]:
        """Check all ranks' times of the previous interval.

        Return the row fields about them, as far as known.
        """
        world = len(waits_s)
        said: dict[str, Any] = {"slowest_rank": None, "slowest_rank_ratio": None}
        if row.pace is None:
            return said
        compute_s = [_finite(value) for value in computed_s]
        self._findings += self._monitor.look(
            step_s=row.pace[0], data_wait_s=waits_s, compute_s=compute_s
        )
        if world == 1:
            return said
        waiting = max(range(world), key=waits_s.__getitem__)
        said |= {
            "longest_data_wait_s": waits_s[waiting],
            "longest_data_wait_rank": waiting,
        }
        known_s = [value for value in compute_s if value is not None]
        if len(known_s) < world or min(known_s) <= 0:
            return said
        slowest = max(range(world), key=known_s.__getitem__)
        return said | {
            "slowest_rank": slowest,
            "slowest_rank_ratio": known_s[slowest] / median_low(known_s),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def status_bytes(name: str) -> int:
    """Return a figure of this process's ``/proc/self/status``, such as ``VmPeak``."""
    found = re.search(
        rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024
