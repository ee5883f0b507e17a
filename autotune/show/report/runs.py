"""Training runs: what they were, whether they kept what was expected of them, and what needs attention."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.core.units import format_bytes, format_count, format_seconds, format_share
from autotune.show.charts.drawing import Axis, Line, Lines, Point
from autotune.show.report.document import Block, Chart, Missing, Paragraph, Section, Table
from autotune.show.report.figures import bounds, count
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from autotune.show.report.rates import Drift, drifts, later_steps
from autotune.show.report.steps import train_commands
from trainer.events import EventRow
from trainer.record import Run

MOST_EVENTS = 20
"""Of a run that are shown, the latest; its record has all."""
_LOSS_STRETCHES = 48
"""A curve of so many means is as good as one of a million steps."""
_MOST_CURVES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """The mean loss of steps that follow each other."""

    first_step: int
    last_step: int
    loss: float | None
    """In nats; None where none of them was finite."""
    evaluated: float | None
    """On the validation split, the latest in this stretch."""


def runs(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """All runs in one table, expected against achieved, the loss, and events."""
    if not reported:
        return (Missing(what="Training (no run was given)", commands=train_commands(profiles[0])),)
    return (_table(reported), *_closing(profiles, reported), *_loss(reported), *_events(reported))


_RUN_FIELDS = (
    "profile", "ranks", "steps", "loss, first → last", "validation loss", "real tokens/s (median)", "MFU (median)",
    "MFU by 6N", "data wait", "rows full", "peak memory", "start to first step", "end",
)  # fmt: skip


def _table(reported: Sequence[ReportedRun]) -> Table:
    columns = [_cells(one) for one in reported]
    rows = tuple([name, *cells] for name, *cells in zip(_RUN_FIELDS, *columns, strict=True))
    return Table(caption="Training runs", headers=("what", *(one.name for one in reported)), rows=rows)


def _cells(one: ReportedRun) -> list[str | None]:
    run, steps = one.run, one.run.steps
    later = later_steps(one)
    mfus = [step.mfu for step in later if step.mfu is not None]
    by_6n = [step.mfu_6n for step in later if step.mfu_6n is not None]
    seconds = sum(step.step_s for step in later)
    full = sum(step.real_tokens for step in later) / max(1, sum(step.slot_tokens for step in later))
    matched = None if one.profile_path is None else f"{one.profile_path.stem}, by {one.matched_by}"
    return [
        matched,
        str(run.header.world_size),
        str(steps[-1].step) if steps else "0",
        f"{_nats(steps[0].loss)} → {_nats(steps[-1].loss)}" if steps else None,
        f"{run.evaluations[-1].loss:.3f}" if run.evaluations else None,
        count(statistics.median(step.real_tokens_per_s for step in later)) if later else None,
        format_share(statistics.median(mfus)) if mfus else None,
        format_share(statistics.median(by_6n)) if by_6n else None,
        format_share(sum(step.data_wait_s for step in later) / seconds) if seconds else None,
        format_share(full) if later else None,
        format_bytes(max(step.peak_memory_bytes for step in steps)) if steps else None,
        format_seconds(run.startup.total_s) if run.startup else None,
        run.end.reason if run.end else "not finished",
    ]


def _nats(loss: float | None) -> str:
    return "n/a" if loss is None else f"{loss:.3f}"


def _closing(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """The loop closed: what was expected of each run, and what it reached."""
    by_path = {one.path: one for one in profiles}
    headers = ("what", "expected", "95 % interval", "achieved", "95 % interval", "ratio", "verdict", "expected by")
    tables = []
    for run in reported:
        one = None if run.profile_path is None else by_path.get(run.profile_path)
        rows = tuple(_drift_cells(drift) for drift in drifts(one, run))
        if rows:
            caption = f"Expected and achieved: {run.name}"
            tables.append(Table(caption=caption, headers=headers, rows=rows, align="lrrrrrll"))
    if not tables:
        return (Paragraph(words=("No run has its profile in this report, so nothing was expected of them.",)),)
    return tuple(tables)


def _drift_cells(drift: Drift) -> list[str | None]:
    forms: dict[str, Callable[[float], str]] = {
        "real tokens/s": count,
        "MFU": format_share,
        "peak memory": format_bytes,
    }
    form = forms[drift.quantity]
    return [
        drift.quantity,
        None if drift.expected is None else form(drift.expected),
        bounds(drift.expected_low, drift.expected_high, form),
        None if drift.achieved is None else form(drift.achieved),
        bounds(drift.achieved_low, drift.achieved_high, form),
        format_share(drift.ratio),
        drift.verdict,
        drift.expected_source,
    ]


def loss_points(run: Run) -> tuple[LossPoint, ...]:
    """A run's loss in stretches of as many logged steps."""
    size = max(1, -(-len(run.steps) // _LOSS_STRETCHES))
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


def _loss(reported: Sequence[ReportedRun]) -> tuple[Block, ...]:
    curves = [(one.name, loss_points(one.run)) for one in reported[:_MOST_CURVES]]
    curves = [(name, points) for name, points in curves if any(point.loss is not None for point in points)]
    if not curves:
        return ()
    lines = []
    for colour, (name, points) in enumerate(curves):
        trained = tuple(Point(x=point.last_step, y=point.loss) for point in points if point.loss is not None)
        lines.append(Line(name=name, points=trained, kind="line", colour=colour))
        held = tuple(Point(x=point.last_step, y=point.evaluated) for point in points if point.evaluated is not None)
        if held:
            lines.append(Line(name=f"{name}, validation", points=held, kind="dots", colour=colour))
    said = [f"{name}: from {_nats(points[0].loss)} to {_nats(points[-1].loss)} nats" for name, points in curves]
    rows = tuple(
        [name, f"{point.first_step:,} to {point.last_step:,}", _nats(point.loss),
         None if point.evaluated is None else _nats(point.evaluated)]
        for name, points in curves for point in points
    )  # fmt: skip
    return (
        Chart(
            title="Loss by step",
            description=f"Mean loss of stretches of steps. {'; '.join(said)}.",
            drawing=Lines(
                x=Axis(label="optimizer steps", unit="count"),
                y=Axis(label="cross-entropy, nats per predicted token"),
                lines=tuple(lines),
            ),
            table=Table(
                caption="The same as figures", headers=("run", "steps", "mean loss", "validation loss"), rows=rows,
                align="lrrr", long=True,
            ),
        ),
    )  # fmt: skip


def _events(reported: Sequence[ReportedRun]) -> tuple[Block, ...]:
    """What needs attention; the latest, where there is much."""
    blocks: list[Block] = []
    for one in reported:
        told = [event for event in one.run.events if event.level != "info"]
        if len(told) > MOST_EVENTS:
            blocks.append(Paragraph(words=(f"{one.name}: {format_count(len(told) - MOST_EVENTS)} earlier events.",)))
        if told:
            blocks.append(_events_table(one.name, told[-MOST_EVENTS:]))
    return (Section(title="What needs attention", key="events", blocks=tuple(blocks)),) if blocks else ()


def _events_table(name: str, told: Sequence[EventRow]) -> Table:
    rows: list[list[str | None]] = [
        [str(event.step), f"{event.level}: {event.kind}", event.message, "; ".join(event.causes) or None, event.action,
         event.next_step or None]
        for event in told
    ]  # fmt: skip
    headers = ("step", "kind", "what happened", "likely causes", "done", "next")
    return Table(caption=f"Events of {name}", headers=headers, rows=tuple(rows), align="rlllll")
