"""Training runs of a report: figures, loss, events, and parts of a step.

``runs_section`` is the part of the page; the other public functions are for the page's
JSON as well.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.base import document as doc
from autotune.base.interval import Interval
from autotune.base.units import format_bytes, format_seconds, format_share
from autotune.base.wording import format_loss, format_number
from autotune.evidence.advice import Bottleneck
from autotune.profiles.decide.drift import Drift, drifts
from autotune.profiles.decide.run_rates import run_rate, settled_steps
from autotune.profiles.reported_profile import ReportedProfile
from autotune.report.sections import bottleneck_words, format_bounded, step_chart
from autotune.report.values import ReportedRun
from trainer.formats.events import EventRow
from trainer.formats.gpu_activity import combine_known
from trainer.formats.run_record import Run, StepRow

MOST_EVENTS = 20
"""Number of the latest events of a run that are shown; its record has all."""
_MOST_CURVES = 6
"""Number of loss curves in a chart; with more, it is not readable."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunRow:
    """A run in the table of runs; a cell is None if the run has no such figure."""

    reported: ReportedRun
    profile: ReportedProfile | None

    @property
    def run(self) -> Run:
        return self.reported.run

    @property
    def profile_title(self) -> str | None:
        return None if self.profile is None else self.profile.title

    @property
    def ended(self) -> str:
        return "not finished" if self.run.end is None else self.run.end.reason

    @property
    def last_step(self) -> str:
        return str(self.run.steps[-1].step) if self.run.steps else "0"

    @property
    def loss(self) -> str | None:
        if not self.run.steps:
            return None
        first = format_loss(self.run.steps[0].loss)
        last = format_loss(self.run.steps[-1].loss)
        return f"{first} → {last}"

    @property
    def validation_loss(self) -> str | None:
        if not self.run.evaluations:
            return None
        return format_loss(self.run.evaluations[-1].loss)

    @property
    def tokens_per_s(self) -> str | None:
        rate = run_rate(self.run)
        if rate is None:
            return None
        return format_bounded(rate.interval, format_number)

    @property
    def peak_memory(self) -> str:
        peaks_bytes = [step.peak_memory_bytes for step in self.run.steps]
        return format_bytes(max(peaks_bytes, default=None))

    @property
    def startup_time(self) -> str:
        startup = self.run.startup
        return format_seconds(None if startup is None else startup.total_s)

    @property
    def recipe_changes(self) -> str | None:
        return "; ".join(self.run.header.recipe_changes) or None


def runs_section(
    profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]
) -> tuple[doc.Block, ...]:
    """Return the blocks on training runs.

    They are a table of runs, the activity of their GPUs, parts of their steps, expected
    and achieved figures, the loss, and events.
    """
    if not runs:
        trainable = [reported for reported in profiles if reported.profile.has_train]
        if not trainable:
            return ()
        commands = train_commands(trainable[0])
        return (doc.Missing(subject="no run was given", commands=commands),)
    return (
        _table(profiles, runs),
        *_gpu_activity(runs),
        *_bottlenecks(runs),
        *_expected(profiles, runs),
        *_loss(runs),
        *_events(runs),
    )


def train_commands(reported: ReportedProfile) -> tuple[str, ...]:
    """Return the commands that run a profile and then report the run."""
    return (
        f"autotune train {reported.quoted} --out runs/NAME",
        f"autotune report {reported.quoted} --run runs/NAME",
    )


def profile_of(
    run: ReportedRun, profiles: Sequence[ReportedProfile]
) -> ReportedProfile | None:
    """Return the profile that a run was started from, if it is in this report."""
    for reported in profiles:
        if reported.path == run.profile_path:
            return reported
    return None


def drifts_of(profile: ReportedProfile | None, run: ReportedRun) -> tuple[Drift, ...]:
    """Compare a run with its profile in this report."""
    if profile is None:
        return ()
    return drifts(
        profile.profile,
        run.run,
        trials=profile.trials,
        intact=profile.intact,
        other_settings=run.other_settings,
    )


def needs_attention(run: Run) -> tuple[EventRow, ...]:
    """Return the warnings and errors of a run."""
    return tuple(event for event in run.events if event.level != "info")


def _table(
    profiles: Sequence[ReportedProfile], runs: Sequence[ReportedRun]
) -> doc.Table:
    return doc.table_of(
        "Training runs",
        [_RunRow(reported=run, profile=profile_of(run, profiles)) for run in runs],
        ("run", "l", lambda row: row.reported.name),
        ("profile", "l", lambda row: row.profile_title),
        ("ended", "l", lambda row: row.ended),
        ("ranks", "r", lambda row: str(row.run.header.world_size)),
        ("steps", "r", lambda row: row.last_step),
        ("loss", "r", lambda row: row.loss),
        ("validation loss", "r", lambda row: row.validation_loss),
        ("tokens/s (95 %)", "r", lambda row: row.tokens_per_s),
        ("peak memory", "r", lambda row: row.peak_memory),
        ("start to first step", "r", lambda row: row.startup_time),
        ("recipe changes", "l", lambda row: row.recipe_changes),
    )


def _gpu_activity(runs: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    """Return the table of GPU activity in the settled steps of runs.

    Runs on a CPU are left out; without another run, there is no table.
    """
    on_gpus = [
        (run.name, settled_steps(run.run) or run.run.steps)
        for run in runs
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


def _bottlenecks(runs: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    """Return the parts of a step, and the bottleneck, of each run that shows one."""
    bottlenecks: list[tuple[str, Bottleneck]] = []
    for run in runs:
        bottlenecks += [(run.name, bottleneck) for bottleneck in run.bottlenecks]
    if not bottlenecks:
        return ()
    items = tuple(
        (doc.Strong(text=name), ": ", *bottleneck_words(bottleneck))
        for name, bottleneck in bottlenecks
    )
    return (step_chart(bottlenecks), doc.Bullets(items=items))


def _expected(
    profiles: Sequence[ReportedProfile], runs: Sequence[ReportedRun]
) -> tuple[doc.Block, ...]:
    """Return the table of expected and achieved figures, if any was expected."""
    drifts_by_run: list[tuple[str, Drift]] = []
    for run in runs:
        profile = profile_of(run, profiles)
        drifts_by_run += [(run.name, drift) for drift in drifts_of(profile, run)]
    if not drifts_by_run:
        return ()
    return (
        doc.table_of(
            "Expected and achieved",
            drifts_by_run,
            ("run", "l", lambda row: row[0]),
            ("figure", "l", lambda row: row[1].quantity),
            ("verdict", "l", lambda row: row[1].verdict),
            ("achieved over expected, 95 %", "r", lambda row: _ratio(row[1])),
            ("achieved, 95 %", "r", lambda row: _figure(row[1], row[1].achieved)),
            (
                "expected, 95 % unless noted",
                "r",
                lambda row: _figure(row[1], row[1].expected),
            ),
            ("expected by", "l", lambda row: row[1].expected_source),
            long=len(drifts_by_run) > doc.LONG_TABLE_ROWS,
        ),
    )


def _ratio(drift: Drift) -> str | None:
    if drift.ratio is None:
        return None
    return format_bounded(drift.ratio, "{:.3f}".format)


def _figure(drift: Drift, interval: Interval | None) -> str | None:
    """Format a figure in the unit of its quantity; None if it is not known."""
    if interval is None:
        return None
    form: Callable[[float], str] = format_number
    if drift.quantity == "MFU":
        form = format_share
    elif drift.quantity == "peak memory":
        form = format_bytes
    return format_bounded(interval, form)


def loss_points(run: Run) -> tuple[LossPoint, ...]:
    """Return a run's loss as means of stretches of equally many logged steps."""
    steps_per_stretch = max(1, math.ceil(len(run.steps) / _STRETCHES))
    points = []
    for start in range(0, len(run.steps), steps_per_stretch):
        stretch = run.steps[start : start + steps_per_stretch]
        first_step = stretch[0].step
        last_step = stretch[-1].step
        losses = [step.loss for step in stretch if step.loss is not None]
        evaluated = [
            evaluation.loss
            for evaluation in run.evaluations
            if first_step <= evaluation.step <= last_step
            and evaluation.loss is not None
        ]
        points.append(
            LossPoint(
                first_step=first_step,
                last_step=last_step,
                loss=statistics.fmean(losses) if losses else None,
                evaluated=evaluated[-1] if evaluated else None,
            )
        )
    return tuple(points)


def _loss(runs: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    """Return the loss curves of the first runs that have one."""
    with_loss = [
        run for run in runs if any(step.loss is not None for step in run.run.steps)
    ]
    curves = [(run.name, loss_points(run.run)) for run in with_loss[:_MOST_CURVES]]
    if not curves:
        return ()
    lines: list[doc.Line] = []
    ranges = []
    for number, (name, points) in enumerate(curves):
        lines += _curve(name, points, colour=number)
        first = format_loss(points[0].loss)
        last = format_loss(points[-1].loss)
        ranges.append(f"{name}: from {first} to {last} nats")
    chart = doc.Chart(
        title="Loss by step",
        description=(
            "Mean loss of stretches of steps; dots are of the validation split."
            f" {'; '.join(ranges)}."
        ),
        drawing=doc.LineChart(
            x=doc.Axis(label="optimizer steps", unit="count"),
            y=doc.Axis(label="nats per predicted token (dots: validation)"),
            lines=tuple(lines),
        ),
        table=doc.table_of(
            "Loss",
            [(name, point) for name, points in curves for point in points],
            ("run", "l", lambda row: row[0]),
            ("up to step", "r", lambda row: f"{row[1].last_step:,}"),
            ("mean loss", "r", lambda row: format_loss(row[1].loss)),
            ("validation loss", "r", lambda row: format_loss(row[1].evaluated)),
            long=True,
        ),
    )
    note = _left_out(
        len(curves),
        len(with_loss),
        "curves of the loss",
        "the first; the JSON file has all",
    )
    return (chart, *note)


def _curve(name: str, points: Sequence[LossPoint], colour: int) -> list[doc.Line]:
    """Return a line of the training loss, and dots of the validation loss if any."""
    trained = tuple(
        doc.Point(x=point.last_step, y=point.loss)
        for point in points
        if point.loss is not None
    )
    evaluated = tuple(
        doc.Point(x=point.last_step, y=point.evaluated)
        for point in points
        if point.evaluated is not None
    )
    lines = [doc.Line(name=name, points=trained, kind="line", colour=colour)]
    if evaluated:
        lines.append(doc.Line(name="", points=evaluated, kind="dots", colour=colour))
    return lines


def _left_out(shown: int, total: int, things: str, which: str) -> tuple[doc.Block, ...]:
    """Return a note on the things that are not shown, if there are any."""
    if shown >= total:
        return ()
    return (doc.paragraph(f"{shown:,} of {total:,} {things} are shown here, {which}."),)


def _events(runs: Sequence[ReportedRun]) -> tuple[doc.Block, ...]:
    """Return the latest warnings and errors of each run, if there are any."""
    latest: list[tuple[str, EventRow]] = []
    total = 0
    for run in runs:
        events = needs_attention(run.run)
        latest += [(run.name, event) for event in events[-MOST_EVENTS:]]
        total += len(events)
    if not latest:
        return ()
    which = f"the latest {MOST_EVENTS} of a run at most; each run's record has all"
    table = doc.table_of(
        "Events of runs",
        latest,
        ("run", "l", lambda row: row[0]),
        ("step", "r", lambda row: str(row[1].step)),
        ("kind", "l", lambda row: f"{row[1].level}: {row[1].kind}"),
        ("event", "l", lambda row: row[1].message),
        ("likely causes", "l", lambda row: "; ".join(row[1].causes) or None),
        ("done", "l", lambda row: row[1].action),
        ("next", "l", lambda row: row[1].next_step or None),
        long=len(latest) > doc.LONG_TABLE_ROWS,
    )
    blocks = (*_left_out(len(latest), total, "events", which), table)
    return (doc.Section(title="What needs attention", key="events", blocks=blocks),)
