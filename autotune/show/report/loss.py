"""The loss of runs, as a chart with its figures."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.show.charts.drawing import Axis, Line, Lines, Point
from autotune.show.report.document import Block, Chart, Table, first_of
from autotune.show.report.figures import nats
from autotune.show.report.inputs import ReportedRun
from trainer.record import Run

_MOST_CURVES = 6
_STRETCHES = 48
"""A curve of so many means is as good as one of a million steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The mean loss of steps that follow each other."""

    first_step: int
    last_step: int
    loss: float | None
    """In nats; None where none of them was finite."""
    evaluated: float | None
    """On the validation split, the latest in this stretch."""


def loss_points(run: Run) -> tuple[LossPoint, ...]:
    """A run's loss in stretches of as many logged steps."""
    size = max(1, -(-len(run.steps) // _STRETCHES))
    found = []
    for first in range(0, len(run.steps), size):
        some = run.steps[first : first + size]
        low, high = some[0].step, some[-1].step
        finite = [step.loss for step in some if step.loss is not None]
        evaluated = [row.loss for row in run.evaluations if low <= row.step <= high]
        found.append(
            LossPoint(
                first_step=low,
                last_step=high,
                loss=statistics.fmean(finite) if finite else None,
                evaluated=evaluated[-1] if evaluated else None,
            )
        )
    return tuple(found)


def loss(reported: Sequence[ReportedRun]) -> tuple[Block, ...]:
    """Of the first runs that have one; a chart of more is not read."""
    falling = [one for one in reported if any(step.loss is not None for step in one.run.steps)]
    kept, left = first_of(falling, _MOST_CURVES, "curves of the loss")
    curves = [(one.name, loss_points(one.run)) for one in kept]
    if not curves:
        return ()
    said = [f"{name}: from {nats(points[0].loss)} to {nats(points[-1].loss)} nats" for name, points in curves]
    rows = tuple(
        [name, f"{point.first_step:,} to {point.last_step:,}", nats(point.loss),
         None if point.evaluated is None else nats(point.evaluated)]
        for name, points in curves for point in points
    )  # fmt: skip
    chart = Chart(
        title="Loss by step",
        description=f"Mean loss of stretches of steps; dots are of the validation split. {'; '.join(said)}.",
        drawing=Lines(
            x=Axis(label="optimizer steps", unit="count"),
            y=Axis(label="nats per predicted token (dots: validation)"),
            lines=tuple(line for number, curve in enumerate(curves) for line in _curve(*curve, number)),
        ),
        table=Table(
            caption="The same as figures", headers=("run", "steps", "mean loss", "validation loss"), rows=rows,
            align="lrrr", long=True,
        ),
    )  # fmt: skip
    return (chart, *left)


def _curve(name: str, points: Sequence[LossPoint], colour: int) -> list[Line]:
    trained = tuple(Point(x=point.last_step, y=point.loss) for point in points if point.loss is not None)
    held = tuple(Point(x=point.last_step, y=point.evaluated) for point in points if point.evaluated is not None)
    lines = [Line(name=name, points=trained, kind="line", colour=colour)]
    return [*lines, Line(name="", points=held, kind="dots", colour=colour)] if held else lines
