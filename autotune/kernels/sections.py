"""Kernels of a step as text, table and roofline."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.document import table_of
from autotune.base.units import format_seconds, format_share
from autotune.base.wording import format_bytes_per_s, format_times, plural
from autotune.evidence.kernels import KernelTime, Roofline, StepKernels
from autotune.kernels.decide.bounds import distance_s, is_near_bound
from autotune.kernels.decide.words import bound_words, kernel_words

FLOPS_PER_BYTE_WITHOUT_MATMUL = 0.25
"""FLOPs per byte at which the roofline shows kernels that only move bytes: one for each
fp32 number. Their distance from the roof does not depend on it."""
_GROUPS = ("matmul", "attention")
"""Kinds of kernels that the roofline tells apart, by the beginning of their words."""
_OTHERS = "memory-bound kernels"
_ROOF_COLOUR = 7
"""Colour of the roof, as an index into the palette: grey."""
_EDGE_FACTOR = 3.0
"""Factor by which the roof extends beyond the kernels on either side."""


def kernel_table(step: StepKernels) -> doc.Table:
    """Return the table of a step's slowest kernels, each with its bound."""

    def cell_s(seconds: float | None) -> str | None:
        return None if seconds is None else format_seconds(seconds)

    def times_bound(kernel: KernelTime) -> str | None:
        if not kernel.bound_s:
            return None
        return format_times(kernel.seconds / kernel.bound_s)

    return table_of(
        f"Slowest kernels of a step ({plural(step.micro_batches, 'micro-batch')} of"
        f" size {step.micro_batch_size})",
        step.kernels,
        ("computes", "l", lambda kernel: kernel_words(kernel.name)),
        ("calls", "r", lambda kernel: f"{kernel.calls:g}"),
        ("time", "r", lambda kernel: format_seconds(kernel.seconds)),
        ("share", "r", lambda kernel: format_share(kernel.seconds / step.step_s)),
        ("bound", "r", lambda kernel: cell_s(kernel.bound_s)),
        ("time / bound", "r", times_bound),
        ("distance", "r", lambda kernel: cell_s(distance_s(kernel))),
        ("kernel", "l", lambda kernel: kernel.name),
    )


def kernels_blocks(step: StepKernels) -> tuple[doc.Block, ...]:
    """Return the blocks on the kernels of a step: facts, roofline and table."""
    roofline = step.roofline
    scale, unit = _flops_unit(roofline)
    rates = (
        f"{format_bytes_per_s(roofline.bytes_per_s)} and"
        f" {roofline.flops_per_s / scale:,.3g} {unit}, measured in the same process"
    )
    facts = doc.Pairs(
        pairs=(
            ("Step and bounds", (bound_words(step),)),
            ("Rates of the device", (rates,)),
        )
    )
    shown = [kernel for kernel in step.kernels if _is_shown(kernel)]
    table = kernel_table(step)
    if not shown:
        return (facts, table)
    chart = doc.Chart(
        title="Roofline of the slowest kernels",
        description=(
            "FLOP/s of each kernel by its FLOPs per byte, below the rates that the"
            " device reached. Kernels without matmuls are shown at"
            f" {FLOPS_PER_BYTE_WITHOUT_MATMUL:g} FLOPs per byte, so their distance from"
            " the roof is that of their bytes/s."
            + (" The step is near its bounds." if is_near_bound(step) else "")
        ),
        drawing=_roofline(shown, roofline),
        table=table,
    )
    return (facts, chart)


def _is_shown(kernel: KernelTime) -> bool:
    """Return whether the roofline has a place for a kernel."""
    return bool(kernel.moved_bytes) and kernel.flops is not None


def _roofline(kernels: Sequence[KernelTime], roofline: Roofline) -> doc.LineChart:
    """Return the roof of the device, and a dot for each kernel."""
    scale, unit = _flops_unit(roofline)
    points_by_group: dict[str, list[doc.Point]] = {}
    for kernel in kernels:
        group = _group_of(kernel)
        points_by_group.setdefault(group, []).append(_point_of(kernel, scale))
    xs = [point.x for points in points_by_group.values() for point in points]
    ridge = roofline.flops_per_s / roofline.bytes_per_s
    ends = (
        min(*xs, ridge) / _EDGE_FACTOR,
        ridge,
        max(*xs, ridge) * _EDGE_FACTOR,
    )
    roof = tuple(
        doc.Point(x=x, y=min(x * roofline.bytes_per_s, roofline.flops_per_s) / scale)
        for x in ends
    )
    lines = [
        doc.Line(
            name="rates of the device", points=roof, kind="line", colour=_ROOF_COLOUR
        ),
        *(
            doc.Line(name=group, points=tuple(points), kind="dots", colour=number)
            for number, (group, points) in enumerate(sorted(points_by_group.items()))
        ),
    ]
    return doc.LineChart(
        x=doc.Axis(label="FLOPs per byte", log=10),
        y=doc.Axis(label=unit, log=10),
        lines=tuple(lines),
    )


def _group_of(kernel: KernelTime) -> str:
    """Return the kind of a kernel, by which the roofline colours it."""
    words = kernel_words(kernel.name)
    return next((group for group in _GROUPS if words.startswith(group)), _OTHERS)


def _flops_unit(roofline: Roofline) -> tuple[float, str]:
    """Return the FLOP/s of the unit that suits a device, and its name."""
    return (1e12, "TFLOP/s") if roofline.flops_per_s >= 1e12 else (1e9, "GFLOP/s")


def _point_of(kernel: KernelTime, scale: float) -> doc.Point:
    """Return the place of a kernel in the roofline.

    Args:
        kernel: The kernel.
        scale: FLOP/s of the vertical axis' unit.
    """
    assert kernel.moved_bytes
    flops = kernel.flops or FLOPS_PER_BYTE_WITHOUT_MATMUL * kernel.moved_bytes
    return doc.Point(x=flops / kernel.moved_bytes, y=flops / kernel.seconds / scale)
