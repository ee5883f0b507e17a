"""Training on more nodes with the same global batch: predicted lines with their intervals, and measured points."""

from collections.abc import Sequence

from autotune.core.evidence import ScalingRow
from autotune.show.charts.drawing import Axis, Line, Lines, Point


def scaling_lines(every: Sequence[tuple[str, Sequence[ScalingRow]]]) -> Lines:
    """The curves of models, each by its name."""
    lines = [line for number, (name, rows) in enumerate(every) for line in _of(name, rows, number)]
    counts = sorted({row.nodes for _, rows in every for row in rows})
    return Lines(
        x=Axis(label="nodes (dotted: ideal)", unit="count", log=2, ticks=tuple(counts)),
        y=Axis(label="real tokens/s", unit="count", log=10),
        lines=tuple(lines),
    )


def _of(name: str, rows: Sequence[ScalingRow], colour: int) -> list[Line]:
    predicted = sorted((row for row in rows if not row.measured), key=lambda row: row.nodes)
    measured = sorted((row for row in rows if row.measured), key=lambda row: row.nodes)
    lines = []
    if predicted:
        first = predicted[0]
        alone = first.real_tokens_per_s / first.nodes / first.efficiency
        ideal = tuple(Point(x=row.nodes, y=alone * row.nodes) for row in predicted)
        points = tuple(_point(row) for row in predicted)
        lines.append(Line(name=f"{name}, predicted", points=points, kind="line", colour=colour))
        lines.append(Line(name="", points=ideal, kind="dotted", colour=colour))
    if measured:
        dots = tuple(Point(x=row.nodes, y=row.real_tokens_per_s) for row in measured)
        lines.append(Line(name=f"{name}, measured", points=dots, kind="dots", colour=colour))
    return lines


def _point(row: ScalingRow) -> Point:
    """With real tokens/s at both ends of the efficiency's interval."""
    low, high = (
        None if end is None else row.real_tokens_per_s * end / row.efficiency
        for end in (row.efficiency_low, row.efficiency_high)
    )
    return Point(x=row.nodes, y=row.real_tokens_per_s, low=low, high=high)
