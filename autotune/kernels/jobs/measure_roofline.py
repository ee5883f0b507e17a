"""Rates that a device reaches: bytes of a copy, and FLOPs of a matmul."""

import statistics
import time
from collections.abc import Callable
from typing import Literal

import torch

from autotune.evidence.kernels import Roofline

_COPIED_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
"""Size of a copied tensor, far beyond the caches. An H100 reaches its highest rate from
256 MiB on."""
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows, columns and inner elements of the matmul."""
_REPEATS = {"cuda": 30, "cpu": 5}
"""Repeats of each measurement. On a GPU the matmuls last long enough for it to reach
its power limit, as in training."""
_WARMUP_REPEATS = 3
RateFormat = Literal["bf16", "tf32", "fp32"]
"""Number format whose matmuls have a different rate."""


def rate_formats(device_kind: str) -> tuple[RateFormat, ...]:
    """Return the formats whose matmuls have different rates on a kind of device."""
    return ("bf16", "tf32", "fp32") if device_kind == "cuda" else ("bf16", "fp32")


def allows_tf32() -> bool:
    """Return whether matmuls of fp32 tensors run in TF32 on a GPU."""
    return torch.get_float32_matmul_precision() != "highest"


def measure_roofline(device: torch.device, number_format: RateFormat) -> Roofline:
    """Return the rates that a device reaches, which takes seconds at most.

    Args:
        device: The device.
        number_format: Format of the matmul.
    """
    dtype = torch.bfloat16 if number_format == "bf16" else torch.float32
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if number_format == "tf32" else "highest")
    try:
        return _measured(device, dtype)
    finally:
        torch.set_float32_matmul_precision(precision)


def _measured(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Return the rates of a copy, and of a matmul of factors of a type."""
    kind = device.type
    repeats = _REPEATS[kind]
    source = torch.ones(_COPIED_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device, repeats)
    size = _MATMUL_SIZE[kind]
    # Random numbers: with zeros a GPU takes less power, and is faster.
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    result = torch.empty_like(left)
    matmul_s = _median_s(lambda: torch.mm(left, right, out=result), device, repeats)
    return Roofline(
        bytes_per_s=2 * _COPIED_BYTES[kind] / copy_s,
        flops_per_s=2 * size**3 / matmul_s,
    )


def _median_s(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of some work, in seconds."""
    seconds = []
    for repeat in range(_WARMUP_REPEATS + repeats):
        started_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= _WARMUP_REPEATS:
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)
