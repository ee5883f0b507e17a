"""The ``matmul`` job: a known load on the device, and the rates it reaches.

Matrix products run for a share of the time, in short slices, so that whatever watches the device from outside can be
held against a load that is known. Random data: products of zeros draw less power and run faster than real ones.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trainer.parallel import pick_device

SLICE_S = 0.05
"""Length of one busy slice: a small part of any window in which a driver counts, and many products of a fast GPU."""
COPIES_PER_SPAN = 8
_WARM_UP_S = 0.5
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Spans(Protocol):
    """Times pieces of work by the device's own clock."""

    def run(self, work: Callable[[], None]) -> None:
        """Do or enqueue a piece of work."""
        ...

    def wait(self, *, unfinished: int = 0) -> None:
        """Wait until at most so many of the pieces are unfinished."""
        ...

    def durations_s(self) -> list[float]:
        """How long each piece kept the device busy; waits for all of them."""
        ...


class CpuSpans:
    """A CPU works while it is asked to, so its time is the caller's."""

    def __init__(self) -> None:
        self._durations_s: list[float] = []

    def run(self, work: Callable[[], None]) -> None:
        """Do it now."""
        started_s = time.perf_counter()
        work()
        self._durations_s.append(time.perf_counter() - started_s)

    def wait(self, *, unfinished: int = 0) -> None:
        """Nothing is ever unfinished."""

    def durations_s(self) -> list[float]:
        """Wall time of each piece."""
        return self._durations_s


class CudaSpans:
    """CUDA events before and after each piece, on the current stream of the current device."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue it; returns before it is done."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        self._spans.append((start, end))

    def wait(self, *, unfinished: int = 0) -> None:
        """Wait for the end of the last piece that must be finished."""
        if len(self._spans) > unfinished:
            self._spans[-1 - unfinished][1].synchronize()

    def durations_s(self) -> list[float]:
        """Device time of each piece, without the time it queued behind others."""
        self.wait()
        return [start.elapsed_time(end) / 1000 for start, end in self._spans]  # CUDA counts milliseconds


def run(measured: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Load the device, and say how busy it really was and how fast.

    Args:
        measured: ``device`` (cpu or cuda), ``dtype`` (bfloat16 or float32), ``size`` (rows and columns of the square
            matrices), ``seconds`` of load, ``duty_share`` of them that is busy (0 to 1), and ``copy_bytes`` of the
            buffer to copy, or 0 for no copy. Whatever else is there only tells trials apart.
        place: Nothing is needed.

    Returns:
        ``flops_per_s`` and ``copy_bytes_per_s`` (medians; None where nothing ran), ``busy_share`` achieved,
        ``window_start_s`` and ``window_end_s`` (CLOCK_MONOTONIC) of the load without its warm-up, ``products``,
        ``slices`` and ``slice_s`` (median).
    """
    del place
    duty_share, seconds = float(measured["duty_share"]), float(measured["seconds"])
    if not 0 <= duty_share <= 1:
        raise ValueError(f"duty_share is {duty_share}: it must lie between 0 and 1")
    device = pick_device(measured["device"], 0)
    if device.type == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    copy_bytes_per_s = _copy_bytes_per_s(measured["copy_bytes"], device) if measured["copy_bytes"] else None
    multiply = _multiplication(measured["size"], _DTYPES[measured["dtype"]], device)
    products_per_slice = max(1, round(SLICE_S / _warm_up(multiply, device)))
    spans = _spans(device)
    window_start_s = time.monotonic()
    _load(lambda: multiply(products_per_slice), spans, seconds, duty_share)
    spans.wait()
    window_end_s = time.monotonic()
    slices_s = spans.durations_s()
    flops_per_slice = 2 * measured["size"] ** 3 * products_per_slice
    return {
        "flops_per_s": flops_per_slice / statistics.median(slices_s) if slices_s else None,
        "copy_bytes_per_s": copy_bytes_per_s,
        "busy_share": sum(slices_s) / (window_end_s - window_start_s),
        "window_start_s": window_start_s,
        "window_end_s": window_end_s,
        "products": products_per_slice * len(slices_s),
        "slices": len(slices_s),
        "slice_s": statistics.median(slices_s) if slices_s else None,
    }


def _spans(device: torch.device) -> Spans:
    return CudaSpans() if device.type == "cuda" else CpuSpans()


def _multiplication(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[int], None]:
    """A function that multiplies so many times."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=product)

    return multiply


def _warm_up(multiply: Callable[[int], None], device: torch.device) -> float:
    """Let libraries load and clocks rise; returns the seconds of one product."""
    spans = _spans(device)
    started_s = time.monotonic()
    while time.monotonic() - started_s < _WARM_UP_S:
        spans.run(lambda: multiply(1))
        spans.wait()
    return statistics.median(spans.durations_s())


def _load(work: Callable[[], None], spans: Spans, seconds: float, duty_share: float) -> None:
    """Work in slices until the time is over, resting in proportion after each."""
    if duty_share == 0:
        time.sleep(seconds)
        return
    end_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < end_s:
        spans.run(work)
        if duty_share == 1:
            spans.wait(unfinished=1)  # the next slice is queued while one runs, so that the device never waits for us
        else:
            spans.wait()
            busy_s = time.monotonic() - began_s
            time.sleep(busy_s * (1 - duty_share) / duty_share)


def _copy_bytes_per_s(buffer_bytes: int, device: torch.device) -> float:
    """Bytes read plus bytes written per second of a copy within the device's memory; median of spans."""
    # From random bytes, because some devices compress what is all alike.
    source = torch.randint(256, (buffer_bytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(COPIES_PER_SPAN):
            target.copy_(source)

    spans = _spans(device)
    for _ in range(12):
        spans.run(copy)
    # The first spans found cold clocks and, on a CPU, pages that did not exist yet.
    return 2 * buffer_bytes * COPIES_PER_SPAN / statistics.median(spans.durations_s()[2:])
