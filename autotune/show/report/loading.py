"""Loader workers: how many are enough, and what devices did meanwhile."""

from autotune.core.evidence import WorkersEvidence
from autotune.core.units import format_share
from autotune.decide.workers import ENOUGH_SHARE
from autotune.show import workers as cells
from autotune.show.charts.drawing import Axis, Line, Lines, Point, Rule
from autotune.show.report.document import Block, Bullets, Chart, Missing, Paragraph, Strong, Table, sentence
from autotune.show.report.inputs import ReportedProfile


def loading(one: ReportedProfile) -> tuple[Block, ...]:
    """The sweep."""
    found = one.profile.evidence.workers
    if found is None or not _has_windows(found):
        command = f"autotune workers --profile {one.quoted}"
        return (Missing(what="The number of loader workers", commands=(*one.probe_first, command)),)
    chosen = Paragraph(
        words=("Chosen: ", Strong(text=cells.chosen_loader(found)), f". {sentence(found.choice)}{_refusal(found)}")
    )
    table = Table(
        caption="Throughput by loader workers",
        headers=cells.HEADERS,
        rows=tuple(cells.workers_cells(row) for row in found.rows),
        align=cells.ALIGN,
    )
    shown: Block = table  # a single count makes no curve
    if len(found.rows) > 1:
        shown = Chart(
            title="Throughput by loader workers, against the same step fed from memory",
            description=_described(found),
            drawing=_drawing(found),
            table=table,
        )
    counters = cells.gpu_rows(found)
    gpu: tuple[Block, ...] = ()
    if counters:
        gpu = (
            Table(
                caption="What the GPUs did in those windows",
                headers=cells.GPU_HEADERS,
                rows=tuple(counters),
                align=cells.GPU_ALIGN,
            ),
        )
    told = Bullets(items=tuple((sentence(line),) for line in cells.workers_lines(found)))
    note = "Utilisation says how long a kernel was running; it is not MFU, which says how much of the peak it used."
    return (chosen, shown, *gpu, told, Paragraph(words=(note,)), *_undecided(one, found))


def _has_windows(found: WorkersEvidence) -> bool:
    """A profile of strangers may have evidence that says nothing."""
    return bool(found.ceiling_slot_tokens_per_s and found.rows) and all(row.slot_tokens_per_s for row in found.rows)


def _refusal(found: WorkersEvidence) -> str:
    return f" {sentence(found.refusal)}" if found.refusal else ""


def _undecided(one: ReportedProfile, found: WorkersEvidence) -> tuple[Block, ...]:
    if not found.undecided_between:
        return ()
    few, many = found.undecided_between[0], found.undecided_between[-1]
    minutes = max(10, round(4 * found.seconds / 60))
    command = f"autotune workers --profile {one.quoted} --minutes {minutes}"
    return (Missing(what=f"Which of {few} to {many} loader workers is enough", commands=(command,)),)


def _described(found: WorkersEvidence) -> str:
    parts = [f"{row.loader_workers}: {format_share(row.ratio_to_ceiling)}" for row in found.rows]
    return f"Share of the ceiling by loader workers: {'; '.join(parts)}. Bars are 98 % intervals."


def _drawing(found: WorkersEvidence) -> Lines:
    rows = sorted(found.rows, key=lambda row: row.loader_workers)
    speed = tuple(
        Point(x=row.loader_workers, y=row.ratio_to_ceiling, low=row.ratio_low, high=row.ratio_high) for row in rows
    )
    waits = tuple(Point(x=row.loader_workers, y=row.data_wait_share) for row in rows)
    busy = tuple(
        Point(x=row.loader_workers, y=row.gpu.utilisation_share)
        for row in rows
        if row.gpu is not None and row.gpu.utilisation_share is not None
    )
    lines = [
        Line(name="tokens/s, of the ceiling", points=speed, colour=0),
        Line(name="waiting for data", points=waits, colour=5),
    ]
    if busy:
        lines.append(Line(name="GPU utilisation", points=busy, colour=2))
    return Lines(
        x=Axis(label="loader workers of a rank", unit="count", ticks=tuple(point.x for point in speed)),
        y=Axis(label="share", unit="share", low=0),
        lines=tuple(lines),
        rules=(Rule(at=ENOUGH_SHARE, label=f"enough: {ENOUGH_SHARE:.0%}"),),
    )
