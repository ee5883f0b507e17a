"""Training runs of a report.

It shows expected and achieved figures, their loss, events, and parts of a step.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.base import document as doc
from autotune.base.units import format_bytes, format_seconds, format_share
from autotune.base.wording import format_loss, format_number
from autotune.profiles.decide.drift import Drift, drifts
from autotune.profiles.decide.run_rates import run_rate, settled_steps
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.sections import bottleneck_words, bounded, step_chart
from autotune.report.values import ReportedRun
from trainer.formats.events import EventRow
from trainer.formats.gpu_activity import combine_known
from trainer.formats.run_record import Run, StepRow

MOST_EVENTS = 20
"""Number of the latest events of a run that are shown; its record has all."""
_MOST_CURVES = 6
_STRETCHES = 48
"""Number of means in a loss curve, which shows as much as a million steps would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """Mean loss of consecutive steps."""

    first_step: int
    last_step: int
    loss: float | None
    """Mean loss in nats; None if none of them was finite."""
    evaluated: float | None
    """Latest loss on the validation split among these steps."""


def runs(
    profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]
) -> tuple[doc.Block, ...]:
    """Return the blocks on training runs.

    They are a table of runs, the activity of their GPUs, parts of their steps, expected
    and achieved figures, the loss, and events.
    """
    trainable = [one for one in profiles if one.profile.has_train]
    if not reported and not trainable:
        return ()
    if not reported:
        return (
            doc.Missing(
                subject="no run was given", commands=train_commands(trainable[0])
            ),
        )
    found = [(one.name, found) for one in reported for found in one.bottlenecks]
    limits = tuple(
        (doc.Strong(text=name), ": ", *bottleneck_words(one)) for name, one in found
    )
    return (
        _table(profiles, reported),
        *_gpu_activity(reported),
        *((step_chart(found), doc.Bullets(items=limits)) if found else ()),
        *((expected,) if (expected := _expected(profiles, reported)).rows else ()),
        *_loss(reported),
        *_events(reported),
    )


def train_commands(one: ReportedProfile) -> tuple[str, ...]:
    """Return the commands that run a profile and then report the run."""
    return (
        f"autotune train {one.quoted} --out runs/NAME",
        f"autotune report {one.quoted} --run runs/NAME",
    )


def profile_of(
    run: ReportedRun, profiles: Sequence[ReportedProfile]
) -> ReportedProfile | None:
    """Return the profile that a run was started from, if it is in this report."""
    return next((one for one in profiles if one.path == run.profile_path), None)


def drifts_of(one: ReportedProfile | None, run: ReportedRun) -> tuple[Drift, ...]:
    """Compare a run with its profile in this report."""
    if one is None:
        return ()
    return drifts(
        one.profile,
        run.run,
        trials=one.trials,
        intact=one.intact,
        other_settings=run.otherwise,
    )


def needs_attention(run: Run) -> tuple[EventRow, ...]:
    """Return the warnings and errors of a run."""
    return tuple(event for event in run.events if event.level != "info")


def _table(
    profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun]
) -> doc.Table:
    return doc.table_of(
        "Training runs",
        [
            (one.name, one.run, one.run.steps, profile_of(one, profiles))
            for one in reported
        ],
        ("run", "l", lambda one: one[0]),
        ("profile", "l", lambda one: None if one[3] is None else one[3].title),
        ("ended", "l", lambda one: one[1].end.reason if one[1].end else "not finished"),
        ("ranks", "r", lambda one: str(one[1].header.world_size)),
        ("steps", "r", lambda one: str(one[2][-1].step) if one[2] else "0"),
        (
            "loss",
            "r",
            lambda one: (
                f"{format_loss(one[2][0].loss)} → {format_loss(one[2][-1].loss)}"
                if one[2]
                else None
            ),
        ),
        (
            "validation loss",
            "r",
            lambda one: (
                format_loss(one[1].evaluations[-1].loss) if one[1].evaluations else None
            ),
        ),
        (
            "tokens/s (95 %)",
            "r",
            lambda one: (
                bounded(rate.interval, format_number)
                if (rate := run_rate(one[1]))
                else None
            ),
        ),
        (
            "peak memory",
            "r",
            lambda one: format_bytes(
                max((step.peak_memory_bytes for step in one[2]), default=None)
            ),
        ),
        (
            "start to first step",
            "r",
            lambda one: format_seconds(
                one[1].startup.total_s if one[1].startup else None
            ),
        ),
        (
            "recipe changes",
            "l",
            lambda one: "; ".join(one[1].header.recipe_changes) or None,
        ),
    )


def _gpu_activity(reported: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    """Return the table of GPU activity in the settled steps of runs.

    Runs on a CPU are left out; without another run, there is no table.
    """
    on_gpus = [
        (run.name, settled_steps(run.run) or run.run.steps)
        for run in reported
        if run.run.header.device != "cpu"
    ]
    if not on_gpus:
        return ()

    def mean(
        name: str, show: Callable[[float | None], str]
    ) -> Callable[[tuple[str, Sequence[StepRow]]], str]:
        """Return the function that shows the mean of a field over a run's steps."""

        def cell(run: tuple[str, Sequence[StepRow]]) -> str:
            _, steps = run
            values = [getattr(step, name) for step in steps]
            return show(combine_known(statistics.fmean, values))

        return cell

    return (
        doc.table_of(
            "Activity of the GPUs of training runs",
            on_gpus,
            ("run", "l", lambda run: run[0]),
            ("GPU busy", "r", mean("gpu_busy_share", format_share)),
            ("least busy GPU", "r", mean("lowest_gpu_busy_share", format_share)),
            ("SMs active", "r", mean("sm_active_share", format_share)),
            ("Tensor Cores active", "r", mean("tensor_active_share", format_share)),
            ("memory bandwidth", "r", mean("dram_active_share", format_share)),
            ("memory busy", "r", mean("memory_busy_share", format_share)),
            ("power of a GPU", "r", mean("gpu_power_w", _watts)),
            ("SM clock", "r", mean("sm_clock_mhz", _megahertz)),
        ),
    )


def _watts(power_w: float | None) -> str:
    return "n/a" if power_w is None else f"{power_w:,.0f} W"


def _megahertz(clock_mhz: float | None) -> str:
    return "n/a" if clock_mhz is None else f"{clock_mhz:,.0f} MHz"


def _expected(
    profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun]
) -> doc.Table:
    found = [
        (run.name, drift)
        for run in reported
        for drift in drifts_of(profile_of(run, profiles), run)
    ]
    forms: dict[str, Callable[[float], str]] = {
        "MFU": format_share,
        "peak memory": format_bytes,
    }
    return doc.table_of(
        "Expected and achieved",
        found,
        ("run", "l", lambda one: one[0]),
        ("figure", "l", lambda one: one[1].quantity),
        ("verdict", "l", lambda one: one[1].verdict),
        (
            "achieved over expected, 95 %",
            "r",
            lambda one: bounded(one[1].ratio, "{:.3f}".format),
        ),
        (
            "achieved, 95 %",
            "r",
            lambda one: bounded(
                one[1].achieved, forms.get(one[1].quantity, format_number)
            ),
        ),
        (
            "expected, 95 % unless noted",
            "r",
            lambda one: bounded(
                one[1].expected, forms.get(one[1].quantity, format_number)
            ),
        ),
        ("expected by", "l", lambda one: one[1].expected_source),
        long=len(found) > doc.LONG_TABLE_ROWS,
    )


def loss_points(run: Run) -> tuple[LossPoint, ...]:
    """Return a run's loss as means of stretches of equally many logged steps."""
    size = max(1, -(-len(run.steps) // _STRETCHES))
    found = []
    for some in (
        run.steps[first : first + size] for first in range(0, len(run.steps), size)
    ):
        low, high = some[0].step, some[-1].step
        finite = [step.loss for step in some if step.loss is not None]
        evaluated = [
            row.loss
            for row in run.evaluations
            if low <= row.step <= high and row.loss is not None
        ]
        loss, last = (
            statistics.fmean(finite) if finite else None,
            evaluated[-1] if evaluated else None,
        )
        found.append(
            LossPoint(first_step=low, last_step=high, loss=loss, evaluated=last)
        )
    return tuple(found)


def _loss(reported: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    """Return the loss curves of the first runs that have one.

    With more, the chart is not readable.
    """
    falling = [
        one for one in reported if any(step.loss is not None for step in one.run.steps)
    ]
    curves = [(one.name, loss_points(one.run)) for one in falling[:_MOST_CURVES]]
    if not curves:
        return ()
    said = [
        f"{name}: from {format_loss(points[0].loss)} to"
        f" {format_loss(points[-1].loss)} nats"
        for name, points in curves
    ]
    chart = doc.Chart(
        title="Loss by step",
        description=(
            "Mean loss of stretches of steps; dots are of the validation split."
            f" {'; '.join(said)}."
        ),
        drawing=doc.LineChart(
            x=doc.Axis(label="optimizer steps", unit="count"),
            y=doc.Axis(label="nats per predicted token (dots: validation)"),
            lines=tuple(
                line
                for number, curve in enumerate(curves)
                for line in _curve(*curve, number)
            ),
        ),
        table=doc.table_of(
            "Loss",
            [(name, point) for name, points in curves for point in points],
            ("run", "l", lambda one: one[0]),
            ("up to step", "r", lambda one: f"{one[1].last_step:,}"),
            ("mean loss", "r", lambda one: format_loss(one[1].loss)),
            ("validation loss", "r", lambda one: format_loss(one[1].evaluated)),
            long=True,
        ),
    )
    return (
        chart,
        *_left_out(
            len(curves),
            len(falling),
            "curves of the loss",
            "the first; the JSON file has all",
        ),
    )


def _left_out(shown: int, of: int, things: str, which: str) -> tuple[doc.Block, ...]:
    return (
        (
            doc.Paragraph(
                words=(f"{shown:,} of {of:,} {things} are shown here, {which}.",)
            ),
        )
        if shown < of
        else ()
    )


def _curve(name: str, points: Sequence[LossPoint], colour: int) -> list[doc.Line]:
    trained = tuple(
        doc.Point(x=point.last_step, y=point.loss)
        for point in points
        if point.loss is not None
    )
    held = tuple(
        doc.Point(x=point.last_step, y=point.evaluated)
        for point in points
        if point.evaluated is not None
    )
    lines = [doc.Line(name=name, points=trained, kind="line", colour=colour)]
    return (
        [*lines, doc.Line(name="", points=held, kind="dots", colour=colour)]
        if held
        else lines
    )


def _events(reported: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    told = [(one.name, needs_attention(one.run)) for one in reported]
    latest = [(name, event) for name, events in told for event in events[-MOST_EVENTS:]]
    if not latest:
        return ()
    which = f"the latest {MOST_EVENTS} of a run at most; each run's record has all"
    table = doc.table_of(
        "Events of runs",
        latest,
        ("run", "l", lambda one: one[0]),
        ("step", "r", lambda one: str(one[1].step)),
        ("kind", "l", lambda one: f"{one[1].level}: {one[1].kind}"),
        ("event", "l", lambda one: one[1].message),
        ("likely causes", "l", lambda one: "; ".join(one[1].causes) or None),
        ("done", "l", lambda one: one[1].action),
        ("next", "l", lambda one: one[1].next_step or None),
        long=len(latest) > doc.LONG_TABLE_ROWS,
    )
    blocks = (
        *_left_out(
            len(latest), sum(len(events) for _, events in told), "events", which
        ),
        table,
    )
    return (doc.Section(title="What needs attention", key="events", blocks=blocks),)
