"""What happens between two logged steps: time and where it went, tokens, memory. Reading the device waits one step.

Figures of all ranks are added up on the device and copied to the host while the next step computes; the row is read
when that step has been handed to the device. A CPU has nothing to wait for.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.events import Finding
from trainer.feed import DataWait, MicroBatch
from trainer.pace import PaceMonitor
from trainer.parallel import Ranks
from trainer.peaks import ModelWork
from trainer.record import StepRow
from trainer.step import StepResult
from trainer.stopwatch import Mark, mark, to_host

SMOOTHING = 0.9
"""Of what was known before, in each update: single estimates are noisy, and their ratio is biased."""


class NoiseScale:
    """The gradient noise scale: from which batch size on a larger one hardly gives a better gradient.

    The squared norm of a mean gradient over B tokens is expected to be G² + S / B: that of the true gradient, and
    noise. Two batch sizes give both (McCandlish et al. 2018, appendix A.1); here the batch of one rank, or of one
    micro-batch, and that of the whole step. Their ratio S / G² is the batch in which both are equal. Left out: how the
    optimizer scales coordinates, so it is a sign of the order of magnitude.

    Both parts are smoothed separately, as their ratio would be biased.
    """

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = 0.0

    def update(self, whole_square: float, part_square: float, part_share: float, tokens: float) -> None:
        """Add an estimate.

        Given are the squared norm of the mean gradient of all tokens, that of a part of them in the mean over parts,
        how large a part is, between 0 and 1, both excluded, and all tokens of the step.
        """
        if not (math.isfinite(whole_square) and math.isfinite(part_square)):
            return  # a step that was left out
        signal = (whole_square - part_share * part_square) / (1 - part_share)
        noise = (part_square - whole_square) * tokens * part_share / (1 - part_share)
        # Both start from nothing and are too small at first by the same factor, which the ratio does not see.
        self._signal = SMOOTHING * self._signal + (1 - SMOOTHING) * signal
        self._noise = SMOOTHING * self._noise + (1 - SMOOTHING) * noise

    @property
    def tokens(self) -> float | None:
        """The noise scale in tokens; None as long as noise hides the signal, or nothing is known."""
        if self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal

    def to_json(self) -> list[float]:
        """Both parts."""
        return [self._signal, self._noise]

    def recall(self, saved: Sequence[float]) -> None:
        """Go on from what ``to_json`` gave."""
        self._signal, self._noise = saved


_FIELDS = ("real_tokens", "slot_tokens", "flops", "part_square", "whole_square")
"""What travels from all ranks, in this order; the squares are means over the interval's steps. Then follow, for each
rank, the seconds of a step in which it computed, and in which it waited for its loader, in the interval before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the figures refer to."""

    work: ModelWork
    peak_flops_per_s: float | None
    """Of one device."""
    hosts: tuple[str, ...] = ()
    """Where each rank runs, by rank, as far as that is known."""


@dataclass(slots=True, kw_only=True)
class _Interval:
    """One rank's figures since the last logged step."""

    began: Mark
    steps: int = 0
    data_wait_s: float = 0.0
    """Known when the interval is closed."""
    real_tokens: int = 0
    slot_tokens: int = 0
    flops: float = 0.0
    parts: int = 0
    part_share: float = 0.0
    part_square: torch.Tensor | None = None
    whole_square: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A row that is on its way from the device."""

    known: dict[str, Any]
    """What it says of what the host knows."""
    interval: _Interval
    results: Sequence[StepResult]
    ended: Mark
    fetched: Sequence[torch.Tensor]
    """Sums over ranks, loss, gradient's norm, and peak of memory."""
    copied: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """How this rank spent a step in an interval that was read."""

    step_s: float
    compute_s: float | None
    data_wait_s: float


class Meter:
    """Measures steps and makes rows of them."""

    def __init__(self, facts: DeviceFacts, ranks: Ranks) -> None:
        self._facts = facts
        self._ranks = ranks
        self.noise = NoiseScale()
        self._pace: _Pace | None = None
        self._pace_told: deque[_Pace | None] = deque()
        self._monitor = PaceMonitor(facts.hosts)
        self._findings: list[Finding] = []
        self._pending: deque[_Pending] = deque()
        self._wait = DataWait(lambda: mark(ranks.device))
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now; what was not closed is forgotten."""
        self._interval = _Interval(began=mark(self._ranks.device))
        self._wait.read()
        self._results: list[StepResult] = []

    def forget(self) -> None:
        """The same, and rows that were not read are left out: their steps are undone."""
        self._pending.clear()
        self._pace_told.clear()
        self.restart()

    def take_findings(self) -> list[Finding]:
        """What the rows since the last call show, on every rank the same."""
        found, self._findings = self._findings, []
        return found

    @property
    def open_steps(self) -> int:
        """Steps since the last logged one."""
        return self._interval.steps

    def take(self, loader: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step; the wait for them is counted as far as the device waited, too."""
        return self._wait.take(loader, count)

    def add(self, batches: Sequence[MicroBatch], result: StepResult) -> None:
        """Count a step that was handed to the device."""
        interval = self._interval
        interval.steps += 1
        for batch in batches:
            lengths = batch.tokens_N.numpy().astype(np.int64)
            interval.real_tokens += batch.real_tokens
            interval.slot_tokens += batch.ids_BS.numel()
            interval.flops += self._facts.work.step_flops(lengths, batch.predicted_tokens)
        self._results.append(result)
        self._wait.gave(result.updated)
        if result.partial is not None:
            whole = result.grad_norm.square().double()
            part = result.partial.square.double()
            interval.whole_square = whole if interval.whole_square is None else interval.whole_square + whole
            interval.part_square = part if interval.part_square is None else interval.part_square + part
            interval.part_share += result.partial.share
            interval.parts += 1

    def close(self, step: int, **known: float) -> None:
        """End the interval, and begin to fetch its figures; ``known`` is what else its row says."""
        device, interval, result = self._ranks.device, self._interval, self._results[-1]
        interval.data_wait_s = self._wait.read()
        ended = mark(device)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        counts = [float(interval.real_tokens), float(interval.slot_tokens), interval.flops]
        squares = [
            zero if square is None else square / interval.parts
            for square in (interval.part_square, interval.whole_square)
        ]
        sums = torch.cat(
            [
                torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True),
                torch.stack(squares),
                torch.tensor(self._pace_of_ranks(), dtype=torch.float64).to(device, non_blocking=True),
            ]
        )
        peak = torch.full((), float(_peak_bytes(device)), dtype=torch.float64, device=device)
        for summed in (self._ranks.begin_sum(sums), self._ranks.begin_max(peak)):
            summed()
        fetched = [to_host(tensor) for tensor in (sums, result.loss, result.grad_norm, peak)]
        pending = _Pending(
            known={"step": step, **known},
            interval=interval,
            results=self._results,
            ended=ended,
            fetched=fetched,
            copied=mark(device),
        )
        self._pending.append(pending)
        self.restart()

    def _pace_of_ranks(self) -> list[float]:
        """This rank's seconds in its own two places; all others are zero, so that sums over ranks are theirs."""
        self._pace_told.append(self._pace)
        places = [0.0] * (2 * self._ranks.world_size)
        if self._pace is not None:
            # Where nobody can tell how long a rank computed, no rank can.
            places[self._ranks.rank] = math.nan if self._pace.compute_s is None else self._pace.compute_s
            places[self._ranks.world_size + self._ranks.rank] = self._pace.data_wait_s
        return places

    def rows(self, *, all_of_them: bool = False) -> Iterator[StepRow]:
        """Rows that have arrived, on every rank the same but for rank 0's times; the last one with ``all_of_them``."""
        # On a GPU the latest is left for later: the device is still at it, and should get its next step meanwhile.
        left = 1 if self._ranks.device.type == "cuda" and not all_of_them else 0
        while len(self._pending) > left:
            yield self._read(self._pending.popleft())

    def _read(self, row: _Pending) -> StepRow:
        row.copied.wait()
        interval, world, steps = row.interval, self._ranks.world_size, row.interval.steps
        fetched: list[Any] = [one.tolist() for one in row.fetched]
        numbers, loss, grad_norm, peak_bytes = fetched
        sums = dict(zip(_FIELDS, numbers[: len(_FIELDS)], strict=True))
        told = self._look_at_pace(numbers[len(_FIELDS) :], world)
        seconds = row.ended.seconds_since(interval.began)
        compute_s = _mean(row.results, _computed_s)
        communication_s = _communication_s(row.results, world)
        self._pace = _Pace(
            step_s=seconds / steps,
            # Without the moment of departure, computing and waiting for others are one.
            compute_s=None if communication_s is None else compute_s,
            data_wait_s=interval.data_wait_s / steps,
        )
        if interval.parts and 0 < interval.part_share / interval.parts < 1:
            self.noise.update(
                sums["whole_square"] / world,
                sums["part_square"] / world,
                interval.part_share / interval.parts,
                sums["real_tokens"] / steps,
            )
        flops_per_s = sums["flops"] / seconds / world
        six_n_per_s = self._facts.work.six_n_flops(sums["real_tokens"]) / seconds / world
        peak = self._facts.peak_flops_per_s
        return StepRow(
            **row.known,
            loss=_finite(loss),
            grad_norm=_finite(grad_norm),
            step_s=seconds / steps,
            data_wait_s=interval.data_wait_s / steps,
            compute_s=compute_s,
            communication_s=communication_s,
            optimizer_s=_mean(row.results, lambda one: one.updated.seconds_since(one.reduced)),
            real_tokens=round(sums["real_tokens"] / steps),
            slot_tokens=round(sums["slot_tokens"] / steps),
            packing_efficiency=sums["real_tokens"] / sums["slot_tokens"],
            real_tokens_per_s=sums["real_tokens"] / seconds,
            real_tokens_per_s_per_rank=sums["real_tokens"] / seconds / world,
            slot_tokens_per_s=sums["slot_tokens"] / seconds,
            slot_tokens_per_s_per_rank=sums["slot_tokens"] / seconds / world,
            model_flops_per_s_per_rank=flops_per_s,
            mfu=flops_per_s / peak if peak else None,
            mfu_6n=six_n_per_s / peak if peak else None,
            peak_memory_bytes=round(peak_bytes),
            gradient_noise_scale_tokens=self.noise.tokens,
            **told,
        )

    def _look_at_pace(self, numbers: Sequence[float], world: int) -> dict[str, Any]:
        """What all ranks' times of the interval before show, and what a row says of them, as far as it is known."""
        before = self._pace_told.popleft()
        said: dict[str, Any] = {"slowest_rank": None, "slowest_rank_ratio": None}
        if before is None:
            return said
        compute_s, waits_s = [_finite(value) for value in numbers[:world]], numbers[world:]
        self._findings += self._monitor.look(step_s=before.step_s, data_wait_s=waits_s, compute_s=compute_s)
        if world == 1:
            return said
        waiting = max(range(world), key=waits_s.__getitem__)
        said |= {"longest_data_wait_s": waits_s[waiting], "longest_data_wait_rank": waiting}
        known_s = [value for value in compute_s if value is not None]
        if len(known_s) < world or min(known_s) <= 0:
            return said
        slowest = max(range(world), key=known_s.__getitem__)
        return said | {"slowest_rank": slowest, "slowest_rank_ratio": known_s[slowest] / statistics.median_low(known_s)}


def _computed_s(result: StepResult) -> float:
    """Forward and backward, without the wait for a number that another rank was late to tell."""
    waited_s = result.counted.seconds_since(result.asked)
    return (result.departed or result.reduced).seconds_since(result.began) - waited_s


def _communication_s(results: Sequence[StepResult], world_size: int) -> float | None:
    if world_size == 1:
        return 0.0
    if any(result.departed is None for result in results):
        return None
    return _mean(
        results,
        lambda one: one.reduced.seconds_since(one.departed or one.reduced) + one.counted.seconds_since(one.asked),
    )


def _mean(results: Sequence[StepResult], seconds: Callable[[StepResult], float]) -> float:
    return sum(map(seconds, results)) / len(results)


def _finite(value: float) -> float | None:
    """A number, or None where it is none."""
    return value if math.isfinite(value) else None


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # Not getrusage's peak, which a process inherits from whoever started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
