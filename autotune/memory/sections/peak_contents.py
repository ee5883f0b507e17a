"""Contents of memory at the peak of a step, for the console and the report."""

from collections.abc import Iterator

from autotune.base import document as doc
from autotune.base.document import bulleted, paragraph, table_of
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_share
from autotune.evidence.peak_contents import (
    NO_MODULE,
    ContentKind,
    LargeAllocation,
    PeakContents,
)

_NOT_ATTRIBUTED = "not attributed"


def peak_contents_section(contents: PeakContents, size: str) -> tuple[doc.Block, ...]:
    """Return the blocks on what memory consists of at the peak.

    Args:
        contents: Contents of a step's memory.
        size: Size of the step for people, such as ``micro_batch_size=8``.
    """
    blocks: list[doc.Block] = [
        paragraph(f"{_moment(contents, size)}."),
        _kinds_chart(contents, size),
        _module_table(contents),
    ]
    if contents.largest:
        blocks.append(_largest_table(contents))
    notes = list(_notes(contents))
    if notes:
        blocks.append(bulleted(notes))
    return tuple(blocks)


def _moment(contents: PeakContents, size: str) -> str:
    """Return a sentence on the peak, or on the refused allocation."""
    during = _phase_words(contents)
    peak = format_bytes(contents.peak_bytes)
    refused = contents.refused
    if refused is None:
        return f"At {size}, memory peaks at {peak} {during}"
    requested = "an allocation"
    if refused.size_bytes is not None:
        requested = f"an allocation of {format_bytes(refused.size_bytes)}"
    shapes = " and ".join(str(tuple(shape)) for shape in refused.input_shapes)
    tensors = f", with tensors of {shapes}" if shapes else ""
    return (
        f"At {size}, {requested} ran out of memory {during}{tensors}; {peak} were in"
        " use"
    )


def _phase_words(contents: PeakContents) -> str:
    """Return the part of the step, the module and the operator of the peak."""
    words = "outside of forward, backward and optimizer step"
    if contents.phase != "other":
        article = "the " if contents.phase == "optimizer step" else ""
        words = f"in {article}{contents.phase}"
    if contents.module != NO_MODULE:
        words = f"{words} of {contents.module}"
    if contents.operator is not None:
        words = f"{words} ({contents.operator})"
    return words


def _kinds_chart(contents: PeakContents, size: str) -> doc.Chart:
    """Return the chart of memory by kind."""
    sizes = {str(kind): bytes_ for kind, bytes_ in contents.bytes_by_kind.items()}
    if contents.not_attributed_bytes:
        sizes[_NOT_ATTRIBUTED] = contents.not_attributed_bytes
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    total = ("peak", contents.peak_bytes)
    by_kind = ", ".join(f"{name} {format_bytes(part)}" for name, part in largest_first)
    return doc.Chart(
        title=f"Memory at the peak, at {size}",
        description=f"{format_bytes(contents.peak_bytes)}: {by_kind}.",
        drawing=doc.StackedBarChart(
            axis=doc.Axis(label="memory", unit="bytes"),
            stacks=(
                doc.Stack(
                    label="peak",
                    parts=tuple((name, float(part)) for name, part in largest_first),
                ),
            ),
        ),
        table=table_of(
            "Memory at the peak by kind",
            [*largest_first, total],
            ("kind", "l", lambda item: item[0]),
            ("size", "r", lambda item: format_bytes(item[1])),
            ("share", "r", lambda item: _share(item[1], contents)),
        ),
    )


def _share(size_bytes: int, contents: PeakContents) -> str | None:
    if not contents.peak_bytes:
        return None
    return format_share(size_bytes / contents.peak_bytes)


def _module_table(contents: PeakContents) -> doc.Table:
    """Return the table of memory by module, with a column for each kind."""
    kinds = list(contents.bytes_by_kind)
    rows: list[Row] = []
    for module in contents.rows:
        sizes = [module.bytes_of(kind) for kind in kinds]
        cells = [format_bytes(size) if size else "" for size in sizes]
        rows.append(
            [
                module.module,
                format_bytes(module.size_bytes),
                _share(module.size_bytes, contents),
                *cells,
            ]
        )
    return doc.Table(
        caption="Memory at the peak by module",
        headers=("module", "size", "share", *(str(kind) for kind in kinds)),
        rows=tuple(rows),
        align="l" + "r" * (len(kinds) + 2),
        long=len(rows) > doc.LONG_TABLE_ROWS,
    )


def _largest_table(contents: PeakContents) -> doc.Table:
    return table_of(
        "Largest allocations at the peak",
        contents.largest,
        ("size", "r", lambda part: format_bytes(part.size_bytes)),
        ("kind", "l", lambda part: str(part.kind)),
        ("module", "l", lambda part: part.module),
        ("operator", "l", lambda part: part.operator),
        ("shape", "l", _shape),
        ("allocated in", "l", lambda part: part.phase or "before the step"),
    )


def _shape(allocation: LargeAllocation) -> str | None:
    if allocation.shape is None:
        return None
    sizes = " x ".join(str(size) for size in allocation.shape) or "scalar"
    return f"{sizes} {allocation.dtype}"


def _notes(contents: PeakContents) -> Iterator[str]:
    """Yield explanations of figures that could be misread."""
    if contents.reserved_bytes is not None:
        free_bytes = contents.reserved_bytes - contents.peak_bytes
        yield (
            f"PyTorch's allocator held {format_bytes(contents.reserved_bytes)} then:"
            f" {format_bytes(free_bytes)} were free blocks; the context, NCCL and"
            " kernels need memory besides"
        )
    if contents.device == "cpu":
        yield (
            "on a CPU this is the memory of tensors; the budget also limits what"
            " libraries and the allocator keep"
        )
        if contents.refused is not None:
            yield (
                "recording takes a part of the budget on a CPU, so that memory ran out"
                " a little earlier than without"
            )
    if contents.is_compiled:
        yield (
            "compiled code ran: its memory belongs to the module that was compiled,"
            " and operators are not told apart"
        )
    if contents.bytes_by_kind.get(ContentKind.OTHER):
        yield (
            "other: allocated before the step and owned by no module or optimizer,"
            " such as workspaces of cuBLAS, gradient buckets of DDP, or copies of"
            " weights"
        )
    if contents.not_attributed_bytes:
        yield (
            f"{_NOT_ATTRIBUTED}: {format_bytes(contents.not_attributed_bytes)} were not"
            " seen to be allocated, or are what the allocator adds when it rounds"
        )
    if contents.missed_releases_bytes:
        yield (
            f"too many allocations: {format_bytes(contents.missed_releases_bytes)} of"
            " the modules' memory had been released unseen"
        )
