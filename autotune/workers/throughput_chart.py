"""Chart of the throughput by number of DataLoader workers."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.units import format_percent, format_share
from autotune.evidence.workers import WorkersEvidence, WorkersRow
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE

# Numbers of the chart's palette. They are fixed, so that a line has the same colour
# whether there is a GPU or not.
_THROUGHPUT_COLOUR = 0
_UTILISATION_COLOUR = 2
_WAIT_COLOUR = 5


def throughput_chart(evidence: WorkersEvidence, table: doc.Table) -> doc.Chart:
    """Return the chart of a sweep, with the table of its values."""
    ratios = "; ".join(
        f"{row.num_workers}: {format_share(row.ratio_to_cached)}"
        for row in evidence.rows
    )
    return doc.Chart(
        title="Throughput by number of DataLoader workers, relative to cached batches",
        description=(
            "Throughput relative to cached batches by num_workers:"
            f" {ratios}. Bars: 98 % CI."
        ),
        drawing=_drawing(evidence),
        table=table,
    )


def _drawing(evidence: WorkersEvidence) -> doc.LineChart:
    """Return the lines over the number of workers, with the sufficient share."""
    rows = sorted(evidence.rows, key=lambda row: row.num_workers)
    return doc.LineChart(
        x=doc.Axis(
            label="num_workers (per rank)",
            unit="count",
            ticks=tuple(row.num_workers for row in rows),
        ),
        y=doc.Axis(label="share", unit="share", low=0),
        lines=tuple(_lines(rows)),
        reference_lines=(
            doc.ReferenceLine(
                value=ENOUGH_SHARE, label=f"sufficient: {format_percent(ENOUGH_SHARE)}"
            ),
        ),
    )


def _lines(rows: Sequence[WorkersRow]) -> list[doc.Line]:
    """Return the lines of throughput, data wait and, with a GPU, its utilisation."""
    throughput = tuple(
        doc.Point(
            x=row.num_workers,
            y=row.ratio_to_cached,
            low=row.ratio_low,
            high=row.ratio_high,
        )
        for row in rows
    )
    waits = tuple(doc.Point(x=row.num_workers, y=row.data_wait_share) for row in rows)
    lines = [
        doc.Line(
            name="throughput vs cached batches",
            points=throughput,
            colour=_THROUGHPUT_COLOUR,
        ),
        doc.Line(name="data wait", points=waits, colour=_WAIT_COLOUR),
    ]
    utilisation = tuple(
        doc.Point(x=row.num_workers, y=row.gpu.utilisation_share)
        for row in rows
        if row.gpu is not None and row.gpu.utilisation_share is not None
    )
    if utilisation:
        lines.append(
            doc.Line(
                name="GPU utilisation", points=utilisation, colour=_UTILISATION_COLOUR
            )
        )
    return lines
