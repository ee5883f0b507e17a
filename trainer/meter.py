"""What happens between two logged steps: time and where it went, tokens, memory. Reading the device waits one step.

Figures of all ranks are added up on the device and copied to the host while the next step computes; the row is read
when that step has been handed to the device. A CPU has nothing to wait for.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.errors import TrainingFailed
from trainer.feed import MicroBatch
from trainer.flops import ModelWork
from trainer.noise import NoiseScale
from trainer.parallel import Ranks
from trainer.record import StepRow
from trainer.step import StepResult
from trainer.stopwatch import Mark, mark

_FIELDS = ("loss", "real_tokens", "slot_tokens", "flops", "part_square", "whole_square")
"""What travels from all ranks, in this order; the squares are means over the interval's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What the figures refer to."""

    work: ModelWork
    peak_flops_per_s: float | None
    """Of one device."""


@dataclass(slots=True, kw_only=True)
class _Interval:
    """One rank's figures since the last logged step."""

    began: Mark
    steps: int = 0
    data_wait_s: float = 0.0
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

    step: int
    learning_rate: float
    interval: _Interval
    results: Sequence[StepResult]
    ended: Mark
    copied: Mark
    sums: torch.Tensor
    grad_norm: torch.Tensor
    peak_bytes: torch.Tensor
    head_overflows: int
    recompilations: int


class Meter:
    """Measures steps and makes rows of them."""

    def __init__(self, facts: DeviceFacts, ranks: Ranks) -> None:
        self._facts = facts
        self._ranks = ranks
        self._noise = NoiseScale()
        self._pending: deque[_Pending] = deque()
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now; what was not closed is forgotten."""
        self._interval = _Interval(began=mark(self._ranks.device))
        self._results: list[StepResult] = []

    @property
    def open_steps(self) -> int:
        """Steps since the last logged one."""
        return self._interval.steps

    def take(self, loader: Iterator[MicroBatch], count: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step, the wait for them counted."""
        asked_s = time.perf_counter()
        batches = [next(loader) for _ in range(count)]
        self._interval.data_wait_s += time.perf_counter() - asked_s
        return batches

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
        if result.partial is not None:
            whole = result.grad_norm.square().double()
            part = result.partial.square.double()
            interval.whole_square = whole if interval.whole_square is None else interval.whole_square + whole
            interval.part_square = part if interval.part_square is None else interval.part_square + part
            interval.part_share += result.partial.share
            interval.parts += 1

    def close(self, step: int, learning_rate: float, *, head_overflows: int, recompilations: int) -> None:
        """End the interval, and begin to fetch its figures."""
        device, interval, result = self._ranks.device, self._interval, self._results[-1]
        ended = mark(device)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        counts = [float(interval.real_tokens), float(interval.slot_tokens), interval.flops]
        squares = [
            zero if square is None else square / interval.parts
            for square in (interval.part_square, interval.whole_square)
        ]
        sums = torch.cat(
            [
                result.loss_share.double().reshape(1),
                torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True),
                torch.stack(squares),
            ]
        )
        peak = torch.full((), float(_peak_bytes(device)), dtype=torch.float64, device=device)
        for summed in (self._ranks.begin_sum(sums), self._ranks.begin_max(peak)):
            summed()
        fetched = [_to_host(tensor) for tensor in (sums, result.grad_norm, peak)]
        self._pending.append(
            _Pending(
                step=step,
                learning_rate=learning_rate,
                interval=interval,
                results=self._results,
                ended=ended,
                copied=mark(device),
                sums=fetched[0],
                grad_norm=fetched[1],
                peak_bytes=fetched[2],
                head_overflows=head_overflows,
                recompilations=recompilations,
            )
        )
        self.restart()

    def rows(self, *, all_of_them: bool = False) -> Iterator[StepRow]:
        """Rows that have arrived, on every rank the same; with ``all_of_them`` it waits for the last.

        Raises:
            TrainingFailed: If loss or gradient are not numbers.
        """
        # On a GPU the latest is left for later: the device is still at it, and should get its next step meanwhile.
        left = 1 if self._ranks.device.type == "cuda" and not all_of_them else 0
        while len(self._pending) > left:
            yield self._read(self._pending.popleft())

    def _read(self, row: _Pending) -> StepRow:
        row.copied.wait()
        interval, world, steps = row.interval, self._ranks.world_size, row.interval.steps
        sums = dict(zip(_FIELDS, row.sums.tolist(), strict=True))
        grad_norm = float(row.grad_norm)
        _check_numbers(row.step, sums["loss"], grad_norm)
        seconds = row.ended.seconds_since(interval.began)
        if interval.parts and 0 < interval.part_share / interval.parts < 1:
            self._noise.update(
                sums["whole_square"] / world,
                sums["part_square"] / world,
                interval.part_share / interval.parts,
                sums["real_tokens"] / steps,
            )
        flops_per_s = sums["flops"] / seconds / world
        six_n_per_s = self._facts.work.six_n_flops(sums["real_tokens"]) / seconds / world
        peak = self._facts.peak_flops_per_s
        return StepRow(
            step=row.step,
            loss=sums["loss"],
            grad_norm=grad_norm,
            learning_rate=row.learning_rate,
            step_s=seconds / steps,
            data_wait_s=interval.data_wait_s / steps,
            compute_s=_mean(row.results, lambda one: (one.departed or one.reduced).seconds_since(one.began)),
            communication_s=_communication_s(row.results, world),
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
            peak_memory_bytes=round(float(row.peak_bytes)),
            gradient_noise_scale_tokens=self._noise.tokens,
            head_overflows=row.head_overflows,
            recompilations=row.recompilations,
        )


def _check_numbers(step: int, loss: float, grad_norm: float) -> None:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    what = (
        f"loss of step {step} is {loss}"
        if not math.isfinite(loss)
        else f"gradient's norm in step {step} is {grad_norm}"
    )
    raise TrainingFailed(
        f"the {what}",
        next_step="Lower train.learning_rate or raise train.warmup_steps; with bf16, compare one run in fp32.",
    )


def _communication_s(results: Sequence[StepResult], world_size: int) -> float | None:
    if world_size == 1:
        return 0.0
    if any(result.departed is None for result in results):
        return None
    return _mean(results, lambda one: one.reduced.seconds_since(one.departed or one.reduced))


def _mean(results: Sequence[StepResult], seconds: Callable[[StepResult], float]) -> float:
    return sum(map(seconds, results)) / len(results)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is on its way; it has arrived when the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # Not getrusage's peak, which a process inherits from whoever started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024
