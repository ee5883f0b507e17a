"""Choice between the kernels of varlen attention, from measured times. No torch here.

Forward and backward are chosen separately: FlashAttention 2 and 4 have the same result
and log-sum-exp, so that one can compute backward after the other's forward.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

VarlenKernel = Literal["fa2", "fa4"]
"""FlashAttention 2, which is part of torch, or 4, the package ``flash-attn-4``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenKernels:
    """Kernels that compute varlen attention."""

    forward: VarlenKernel
    backward: VarlenKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPasses:
    """Times of a kernel in milliseconds."""

    forward_ms: float
    forward_and_backward_ms: float

    @property
    def backward_ms(self) -> float:
        """Time of backward alone."""
        return self.forward_and_backward_ms - self.forward_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLength:
    """Times of both kernels with documents of one length."""

    document_tokens: int
    fa2: MeasuredPasses
    fa4: MeasuredPasses


MEASURED = (
    MeasuredLength(
        document_tokens=128,
        fa2=MeasuredPasses(forward_ms=0.105, forward_and_backward_ms=0.531),
        fa4=MeasuredPasses(forward_ms=0.239, forward_and_backward_ms=0.668),
    ),
    MeasuredLength(
        document_tokens=256,
        fa2=MeasuredPasses(forward_ms=0.139, forward_and_backward_ms=0.644),
        fa4=MeasuredPasses(forward_ms=0.204, forward_and_backward_ms=0.589),
    ),
    MeasuredLength(
        document_tokens=512,
        fa2=MeasuredPasses(forward_ms=0.212, forward_and_backward_ms=0.950),
        fa4=MeasuredPasses(forward_ms=0.191, forward_and_backward_ms=0.632),
    ),
)
"""Times for 32,768 tokens in 12 heads of 64 dimensions, bf16, in both directions.

Measured on one H100 SXM 80 GB (700 W, driver 580, torch 2.11.0, CUDA 13, flash-attn-4
4.0.0b36) on 2026-11-27. With 179 documents of real lengths, 183 tokens on average, FA2
took 0.235 ms forward and 0.966 ms in all, FA4 0.244 and 0.758: as between the rows of
128 and 256, FA2's forward and FA4's backward are faster. Other GPUs, heads and numbers
of tokens were not measured.
"""


def fastest_kernels(document_tokens: float) -> VarlenKernels:
    """Return the kernels that are fastest for documents of a mean length.

    Between measured lengths, times are interpolated by the logarithm of the length;
    outside, they are those of the nearest measured length.

    Args:
        document_tokens: Tokens of a document, on average over documents.
    """
    return VarlenKernels(
        forward=_faster(
            document_tokens,
            fa2_ms=[row.fa2.forward_ms for row in MEASURED],
            fa4_ms=[row.fa4.forward_ms for row in MEASURED],
        ),
        backward=_faster(
            document_tokens,
            fa2_ms=[row.fa2.backward_ms for row in MEASURED],
            fa4_ms=[row.fa4.backward_ms for row in MEASURED],
        ),
    )


def _faster(
    document_tokens: float, *, fa2_ms: list[float], fa4_ms: list[float]
) -> VarlenKernel:
    """Return the faster kernel of one direction, FlashAttention 2 if both are equal.

    Args:
        document_tokens: Mean length of a document.
        fa2_ms: Times of FlashAttention 2 at the measured lengths.
        fa4_ms: Times of FlashAttention 4 at the measured lengths.
    """
    is_fa4_faster = _interpolate(document_tokens, fa4_ms) < _interpolate(
        document_tokens, fa2_ms
    )
    return "fa4" if is_fa4_faster else "fa2"


def _interpolate(document_tokens: float, times_ms: list[float]) -> float:
    """Return the time in milliseconds at a length, from those at measured lengths."""
    points = [
        (math.log(row.document_tokens), time_ms)
        for row, time_ms in zip(MEASURED, times_ms, strict=True)
    ]
    position = math.log(max(document_tokens, 1.0))
    if position <= points[0][0]:
        return points[0][1]
    for (left, left_ms), (right, right_ms) in pairwise(points):
        if position <= right:
            share = (position - left) / (right - left)
            return left_ms + share * (right_ms - left_ms)
    return points[-1][1]
