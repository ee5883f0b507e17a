"""Roofline: the time of each kernel and of the step. Pure.

They follow from the constants of a machine. A kernel takes as long as its bytes or its
FLOPs need; a matmul's reading and writing overlap little with its FLOPs, so both count.
Measured kernels of one H100 gave the shares of the data sheet that kernels reach.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from autotune.base.interval import Interval
from autotune.speed.values import (
    AttentionRates,
    Kernel,
    MachineRates,
    MatmulRates,
    PassRate,
    SpeedPrediction,
    StepWork,
)
from trainer.formats.gpu_peaks import find_peak, matmul_format, peak_flops_per_s
from trainer.formats.train_config import TRIMMED_LAYOUTS, TrainConfig

Float64 = npt.NDArray[np.float64]

MATMUL_SHARE, MATMUL_BYTES_SHARE, MATMUL_FIXED_S = 0.87, 2.0, 4e-6
"""Rates of matmuls as shares of the data sheet's FLOP/s and bytes/s, and their fixed
time. Half of the bytes are hidden by the FLOPs. Fitted to 105 matmuls of encoder layers
on an H100 (``reports/gpu/``): 3 % error in the median."""
BYTES_SHARE, KERNEL_S = 0.87, 3e-6
"""Share of the memory bandwidth that elementwise kernels reach, and their fixed time;
same source."""
ATTENTION_SHARES = {
    "hopper": {
        "varlen": (0.35, 0.20),
        "flash": (0.35, 0.20),
        "efficient": (0.085, 0.078),
        "FA4": (0.38, 0.30),
    },
    "other": {"varlen": (0.62, 0.50), "flash": (0.62, 0.50), "efficient": (0.29, 0.22)},
}
"""Rates of attention kernels, forward and backward, as shares of the bf16 peak on long
documents: measured on an H100; for other GPUs from the paper of FlashAttention 2 (Dao
2023). Those of FlashAttention 4 reproduce its times in ``varlen_kernels``, forward with
documents of 512 tokens and backward of 256."""
ATTENTION_HALF_TOKENS = 200.0
LAUNCH_S, COMPILED_LAUNCH_S, GRAPH_CALL_S = 20e-6, 25e-6, 0.8e-3
"""Host times, from steps of BERT on an H100's host; hosts differ much."""
FLOAT8_SLOWER = 1.85
"""Time of kernels around float8 matmuls over that of their bytes: they compute GELU
three times and write transposed copies. Measured on an H100."""
RANGE_SHARE = 0.2
GAPS_SHARE = 0.02
"""Share of a step in which the device has no work although the host runs ahead."""
_PARTS = {"matmul": "matmuls", "attention": "attention", "optimizer": "optimizer"}


def data_sheet_rates(gpu_name: str) -> MachineRates | None:
    """Return a GPU's constants from its data sheet.

    Returns:
        The constants, or None if the GPU is not in the table of peaks.
    """
    peak = find_peak(gpu_name)
    if peak is None:
        return None
    shares = ATTENTION_SHARES["hopper" if "H" in peak.name.split()[0] else "other"]
    bytes_per_s = MATMUL_BYTES_SHARE * peak.memory_bytes_per_s
    # No float8 matmul was measured: they are assumed to reach the share of the peak
    # that bf16 ones reach.
    matmul = {
        dtype: MatmulRates(
            flops_per_s=MATMUL_SHARE * rate,
            bytes_per_s=bytes_per_s,
            fixed_s=MATMUL_FIXED_S,
        )
        for dtype, rate in {
            "bf16": peak.bf16_flops_per_s,
            "fp32": peak.tf32_flops_per_s,
            "fp8": peak.fp8_flops_per_s,
        }.items()
        if rate is not None
    }
    attention = {}
    for kernel, both in shares.items():
        half = ATTENTION_HALF_TOKENS if kernel != "efficient" else 0.0
        for direction, share in zip(("forward", "backward"), both, strict=True):
            for dtype, rate in (
                ("bf16", peak.bf16_flops_per_s),
                ("fp32", peak.tf32_flops_per_s),
            ):
                rates = AttentionRates(flops_per_s=share * rate, half_tokens=half)
                attention[f"{kernel} {direction} {dtype}"] = rates
    return MachineRates(
        device=gpu_name,
        source=f"data sheet ({peak.source})",
        matmul=matmul,
        attention=attention,
        passes={
            "copy": [
                PassRate(
                    moved_bytes=1, bytes_per_s=BYTES_SHARE * peak.memory_bytes_per_s
                )
            ]
        },
        kernel_s=KERNEL_S,
        launch_s=LAUNCH_S,
        compiled_launch_s=COMPILED_LAUNCH_S,
        graph_call_s=GRAPH_CALL_S,
        host_runs_ahead=True,
        range_share=RANGE_SHARE,
    )


def fit_matmul_rates(
    flops: Float64, moved_bytes: Float64, seconds: Float64
) -> MatmulRates:
    """Return the rates that fit measured matmuls best, by relative error.

    All arrays have shape (N,).
    """
    columns = (
        np.stack([flops, moved_bytes, np.ones_like(flops)], axis=1) / seconds[:, None]
    )
    used = [0, 1, 2]
    # Without terms that would be negative.
    while (
        solved := np.linalg.lstsq(columns[:, used], np.ones_like(flops), rcond=None)[0]
    ).min() < 0:
        used.pop(int(solved.argmin()))
    found = dict(zip(used, map(float, solved), strict=True))
    flops_per_s, bytes_per_s = (
        1 / found[term] if found.get(term) else 1e18 for term in (0, 1)
    )
    return MatmulRates(
        flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, fixed_s=found.get(2, 0.0)
    )


def kernel_s(kernel: Kernel, rates: MachineRates) -> float:
    """Return the time of a kernel on the device, in seconds."""
    if kernel.kind == "graph call":
        return 0.0
    if kernel.kind == "matmul":
        matmul = rates.matmul.get(kernel.dtype, rates.matmul["fp32"])
        return (
            kernel.flops / matmul.flops_per_s
            + kernel.moved_bytes / matmul.bytes_per_s
            + matmul.fixed_s
        )
    measured = rates.passes.get(kernel.kind, rates.passes["copy"])
    # The rate lies between two by the logarithm of size.
    sizes = [math.log(point.moved_bytes) for point in measured]
    rate = np.interp(
        math.log(max(1, kernel.moved_bytes)),
        sizes,
        [point.bytes_per_s for point in measured],
    )
    moving_s = kernel.moved_bytes / float(rate)
    found = (
        _attention_rates(kernel, rates.attention)
        if kernel.kind == "attention"
        else None
    )
    if found is not None:
        slower = 1 + found.half_tokens / max(1.0, kernel.document_tokens)
        moving_s = max(moving_s, kernel.flops / found.flops_per_s * slower)
    return moving_s + rates.kernel_s


def _attention_rates(
    kernel: Kernel, attention: Mapping[str, AttentionRates]
) -> AttentionRates | None:
    """Return the rates of an attention kernel; None if they are not known."""
    name = f"{kernel.name} {kernel.dtype}"
    # A machine that was measured without FlashAttention 4, or a data sheet of a GPU on
    # which it was not measured, has only rates of FlashAttention 2.
    return attention.get(name) or attention.get(name.replace("FA4", "varlen"))


def attention_rates(
    lengths: Sequence[int], flops_per_s: Sequence[float]
) -> AttentionRates:
    """Return the rates that two measured lengths of documents show."""
    (short, long), (slow, fast) = lengths, flops_per_s
    # 1 / rate = (1 + half / length) / most
    half = (
        max(0.0, (1 / slow - 1 / fast) / (1 / (fast * short) - 1 / (slow * long)))
        if fast > slow
        else 0.0
    )
    return AttentionRates(flops_per_s=fast * (1 + half / long), half_tokens=half)


def predict_speed(
    work: StepWork,
    rates: MachineRates,
    train: TrainConfig,
    non_padding_tokens: float | None = None,
) -> SpeedPrediction:
    """Return the predicted speed of a step.

    ``non_padding_tokens`` are those of a sequence, None if not known.
    """
    peak = peak_flops_per_s(
        rates.device, matmul_format(train.precision, tf32=train.tf32)
    )
    # Trimmed layouts leave out most of the padding.
    full = (
        1.0
        if train.layout in TRIMMED_LAYOUTS
        else (non_padding_tokens or 0.0) / train.seq_length_tokens
    )
    parts: dict[str, float] = {}
    host_s = 0.0
    compiled = any(kernel.kind == "graph call" for kernel, _ in work.kernels)
    launch_s = rates.compiled_launch_s if compiled else rates.launch_s
    for kernel, count in work.kernels:
        part = _PARTS.get(kernel.kind, "memory-bound kernels")
        slower = (
            FLOAT8_SLOWER
            if train.float8 != "none" and part == "memory-bound kernels"
            else 1.0
        )
        parts[part] = parts.get(part, 0.0) + count * slower * kernel_s(kernel, rates)
        # Replayed CUDA graphs cost as much: on an H100, steps of 8 sequences took 32.2
        # instead of 32.7 ms.
        host_s += count * (
            rates.graph_call_s if kernel.kind == "graph call" else launch_s
        )
    device_s = sum(parts.values())
    waiting_s = (
        max(GAPS_SHARE * device_s, host_s - device_s)
        if rates.host_runs_ahead
        else host_s
    )
    step_s = device_s + waiting_s
    low_s, high_s = step_s * (1 - rates.range_share), step_s * (1 + rates.range_share)
    seconds = Interval(value=step_s, low=low_s, high=high_s)
    per_s = Interval(value=1 / step_s, low=1 / high_s, high=1 / low_s)
    return SpeedPrediction(
        device=rates.device,
        source=rates.source,
        micro_batch_size=work.micro_batch_size,
        step_s=seconds,
        padded_tokens_per_s=per_s.scaled(work.padded_tokens),
        parts_s=parts | {"host": waiting_s},
        non_padding_tokens_per_s=(
            None
            if non_padding_tokens is None
            else per_s.scaled(work.padded_tokens * full)
        ),
        mfu=None if peak is None else per_s.scaled(work.model_flops / peak),
    )


def predict_steps_s(
    works: Sequence[StepWork],
    rates: MachineRates,
    train: TrainConfig,
    sizes: Sequence[int],
    counts: Sequence[float],
) -> list[float]:
    """Return the predicted seconds of optimizer steps, one for each count.

    Each step has ``counts`` micro-batches. ``works`` are traces of two or more sizes.
    """
    works = sorted(works, key=lambda one: one.micro_batch_size)
    speeds = [predict_speed(work, rates, train) for work in works]
    optimizer_s = speeds[-1].parts_s.get("optimizer", 0.0)
    traced = [0, *(work.micro_batch_size for work in works)]
    token_s = [
        (one.step_s.value - optimizer_s) / work.padded_tokens
        for one, work in zip(speeds, works, strict=True)
    ]
    of_traced = [
        size * train.seq_length_tokens * one
        for size, one in zip(traced[1:], token_s, strict=True)
    ]
    slope_s = (of_traced[1] - of_traced[0]) / (traced[2] - traced[1])
    of_traced.insert(0, max(0.0, of_traced[0] - traced[1] * slope_s))
    micro_batch_s = np.interp(sizes, traced, of_traced)
    return [
        float(one) * count + optimizer_s
        for one, count in zip(micro_batch_s, counts, strict=True)
    ]
