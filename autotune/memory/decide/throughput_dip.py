"""A dip of the throughput curve, and the kernels that explain it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.base.wording import format_times
from autotune.evidence.probe import CurvePoint, GrownKernel, ThroughputDip
from autotune.evidence.profile import SubjectTable
from autotune.kernels.decide.words import kernel_words
from autotune.trials.job_figures import KernelFigures

DIP_SHARE = 0.98
"""Share of the throughput at a smaller size below which a larger size is a dip."""
GROWTH_RATIO = 1.1
"""Least growth of a kernel's time per token that is named."""
MAX_NAMED_KERNELS = 3
"""Most kernels that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dip:
    """A size that has fewer tokens/s than a smaller one."""

    smaller: CurvePoint
    larger: CurvePoint


def fastest_point(curve: Sequence[CurvePoint]) -> CurvePoint:
    """Return the point of a curve with the most tokens/s."""
    return max(curve, key=lambda point: point.units_per_s)


def deepest_dip(curve: Sequence[CurvePoint]) -> Dip | None:
    """Return the deepest dip of a curve; None if there is none.

    A dip counts only if the intervals of both rates, as far as they are known, do not
    overlap.
    """
    deepest: Dip | None = None
    lowest_ratio = DIP_SHARE
    points = sorted(curve, key=lambda point: point.size)
    for index, larger in enumerate(points):
        for smaller in points[:index]:
            ratio = larger.units_per_s / smaller.units_per_s
            if ratio < lowest_ratio and not _overlap(smaller, larger):
                deepest = Dip(smaller=smaller, larger=larger)
                lowest_ratio = ratio
    return deepest


def _overlap(smaller: CurvePoint, larger: CurvePoint) -> bool:
    """Return whether noise may explain that the larger size is slower."""
    low = smaller.rate.low
    high = larger.rate.high
    return low is not None and high is not None and high >= low


def dip_words(dip: ThroughputDip, subject: SubjectTable) -> str:
    """Return where throughput falls, and the kernels that explain it, in words.

    Args:
        dip: The dip.
        subject: What was probed, for its size and its unit.
    """
    larger, unit = subject.size_words(dip.larger_size), subject.unit
    words = f"{unit}/s fall by {1 - dip.ratio:.1%} from {dip.smaller_size} to {larger}"
    if dip.not_profiled is not None:
        return f"{words}; its kernels were not profiled: {dip.not_profiled}"
    if not dip.kernels:
        return f"{words}; no kernel explains it"
    kernels = ", ".join(
        f"{kernel_words(kernel.name)} takes {format_times(kernel.ratio)} as long per"
        f" {unit.removesuffix('s')} ({kernel.name})"
        for kernel in dip.kernels
    )
    return f"{words}: {kernels}"


def grown_kernels(smaller: KernelFigures, larger: KernelFigures) -> list[GrownKernel]:
    """Return the kernels whose time per token grew, those that add most first.

    Compiled kernels may have other names at another size. All kernels that only one
    size has are compared by what their names have in common, which is their name
    without numbers.
    """
    before = _seconds_per_token(smaller)
    after = _seconds_per_token(larger)
    grown = []
    for name, seconds in after.items():
        earlier = before.get(name, 0.0)
        if earlier > 0 and seconds / earlier >= GROWTH_RATIO:
            grown.append(
                GrownKernel(
                    name=name,
                    ratio=seconds / earlier,
                    added_s_per_token=seconds - earlier,
                )
            )
    grown.sort(key=lambda kernel: kernel.added_s_per_token, reverse=True)
    return grown[:MAX_NAMED_KERNELS]


def _seconds_per_token(figures: KernelFigures) -> dict[str, float]:
    """Return the seconds per token of kernels, by their name without numbers."""
    seconds: dict[str, float] = {}
    for kernel in figures.kernels:
        name = "".join(letter for letter in kernel.name if not letter.isdigit())
        per_token = kernel.seconds / figures.units_per_step
        seconds[name] = seconds.get(name, 0.0) + per_token
    return seconds
