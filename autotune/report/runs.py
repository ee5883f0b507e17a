"""Training runs: expected and achieved figures, their loss, events, and parts of a step."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.advice.decide.bottleneck import steps_of_this_start
from autotune.advice.values import Bottleneck, Cause
from autotune.base.document import (
    LONG_TABLE_ROWS,
    Axis,
    Block,
    Bullets,
    Chart,
    Line,
    Lines,
    Missing,
    Paragraph,
    Point,
    Section,
    Stacks,
    Strong,
    Table,
    Words,
    table_of,
)
from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_seconds, format_share
from autotune.base.wording import bounds, confidence_words, count, nats, plural, with_interval
from autotune.profiles.decide.rates import Drift, drifts
from autotune.report.values import ReportedProfile, ReportedRun
from trainer.health.events import EventRow
from trainer.record.run_record import Run

MOST_EVENTS = 20
"""Number of the latest events of a run that are shown; its record has all."""
_MOST_CURVES = 6
_STRETCHES = 48
"""Number of means in a loss curve, which shows as much as a million steps would."""
CAUSES: dict[Cause, str] = {
    "compute": "computing real tokens",
    "padding": "computing padding",
    "data loading": "waiting for data",
    "network": "waiting for gradients",
    "straggler": "waiting for the slowest rank",
    "launch-bound": "waiting for the program",
    "memory": "waiting for the device's memory",
    "optimizer step": "clipping and update",
}
"""Names of the parts of a step, in the order of the bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """Mean loss of consecutive steps."""

    first_step: int
    last_step: int
    loss: float | None
    """Mean loss in nats; None if none of them was finite."""
    evaluated: float | None
    """Latest loss on the validation split among these steps."""


def runs(profiles: tuple[ReportedProfile, ...], reported: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Return all runs in two tables, expected and achieved figures in another, the loss, and events."""
    if not reported:
        return (Missing(what="Training (no run was given)", commands=train_commands(profiles[0])),)
    return (*_tables(profiles, reported), _expected(profiles, reported), *_loss(reported), *_events(reported))


def train_commands(one: ReportedProfile) -> tuple[str, ...]:
    """Return the commands that run a profile and then report the run."""
    ranks = one.profile.local_ranks
    train = f"torchrun --nproc-per-node {ranks} -m trainer --profile {one.quoted} --data DIR --out runs/NAME"
    return (train, f"autotune report {one.quoted} --run runs/NAME")


def profile_of(run: ReportedRun, profiles: Sequence[ReportedProfile]) -> ReportedProfile | None:
    """Return the profile that a run was started from, if it is in this report."""
    return next((one for one in profiles if one.path == run.profile_path), None)


def drifts_of(one: ReportedProfile | None, run: ReportedRun) -> tuple[Drift, ...]:
    """Compare a run with its profile in this report."""
    if one is None:
        return ()
    return drifts(one.profile, run.run, trials=one.trials, intact=one.intact, otherwise=run.otherwise)


def needs_attention(run: Run) -> tuple[EventRow, ...]:
    """Return the warnings and errors of a run."""
    return tuple(event for event in run.events if event.level != "info")


def _tables(profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun]) -> tuple[Table, Table]:
    rows: list[Row] = []
    more: list[Row] = []
    for one in reported:
        run, profile = one.run, profile_of(one, profiles)
        steps = run.steps
        # Of the last start, without its first, which pays for the start; all, where that is all there is.
        later = steps_of_this_start(run) or steps
        seconds = sum(step.step_s for step in later)
        full = sum(step.non_padding_tokens for step in later) / max(1, sum(step.padded_tokens for step in later))
        rows.append(
            [
                one.name,
                None if profile is None else profile.title,
                run.end.reason if run.end else "not finished",
                str(run.header.world_size),
                str(steps[-1].step) if steps else "0",
                f"{nats(steps[0].loss)} → {nats(steps[-1].loss)}" if steps else None,
                count(statistics.median(step.tokens_per_s for step in later)) if later else None,
                _median_share([step.mfu for step in later]),
                format_share(sum(step.data_wait_s for step in later) / seconds) if seconds else None,
                format_bytes(max(step.peak_memory_bytes for step in steps)) if steps else None,
            ]
        )
        more.append(
            [
                one.name,
                one.matched_by,
                nats(run.evaluations[-1].loss) if run.evaluations else None,
                _median_share([step.mfu_6n for step in later]),
                format_share(full) if later else None,
                format_seconds(run.startup.total_s) if run.startup else None,
                str(len(needs_attention(run))),
            ]
        )
    headers = ("run", "profile", "ended", "ranks", "steps", "loss, first → last", "real tokens/s (median)",
               "MFU (median)", "data wait", "peak memory")  # fmt: skip
    others = ("run", "profile found by", "validation loss", "MFU by 6N", "rows full", "start to first step", "events")
    return (
        Table(caption="Training runs", headers=headers, rows=tuple(rows), align="lllrrrrrrr"),
        Table(caption="More of each run", headers=others, rows=tuple(more), align="llrrrrr"),
    )


def _median_share(shares: Sequence[float | None]) -> str | None:
    known = [share for share in shares if share is not None]
    return format_share(statistics.median(known)) if known else None


def _expected(profiles: Sequence[ReportedProfile], reported: Sequence[ReportedRun]) -> Block:
    """Return what was expected of each run, and what it achieved."""
    found = [(run.name, drift) for run in reported for drift in drifts_of(profile_of(run, profiles), run)]
    if not found:
        return Paragraph(words=("No run has its profile in this report, so nothing was expected of them.",))
    forms: dict[str, Callable[[float], str]] = {
        "non-padding tokens/s": count, "MFU": format_share, "peak memory": format_bytes
    }  # fmt: skip
    return table_of(
        "Expected and achieved", found,
        ("run", "l", lambda one: one[0]),
        ("what", "l", lambda one: one[1].quantity),
        ("verdict", "l", lambda one: one[1].verdict),
        ("achieved over expected, 95 %", "r", lambda one: _bounded(one[1].ratio, "{:.3f}".format)),
        ("achieved, 95 %", "r", lambda one: _bounded(one[1].achieved, forms[one[1].quantity])),
        ("expected, 95 % unless told", "r", lambda one: _bounded(one[1].expected, forms[one[1].quantity])),
        ("expected by", "l", lambda one: one[1].expected_source),
        long=len(found) > LONG_TABLE_ROWS,
    )  # fmt: skip


def _bounded(known: Interval | None, form: Callable[[float], str]) -> str | None:
    """Format a value with its bounds, and their confidence unless the headings state it."""
    if known is None:
        return None
    between = bounds(known.low, known.high, form)
    if between is None:
        return form(known.value)
    told = "" if known.confidence == SHOWN_CONFIDENCE else f", {confidence_words(known.confidence)}"
    return f"{form(known.value)} ({between}{told})"


def loss_points(run: Run) -> tuple[LossPoint, ...]:
    """Return a run's loss as means of stretches of equally many logged steps."""
    size = max(1, -(-len(run.steps) // _STRETCHES))
    found = []
    for first in range(0, len(run.steps), size):
        some = run.steps[first : first + size]
        low, high = some[0].step, some[-1].step
        finite = [step.loss for step in some if step.loss is not None]
        evaluated = [row.loss for row in run.evaluations if low <= row.step <= high]
        loss, last = statistics.fmean(finite) if finite else None, evaluated[-1] if evaluated else None
        found.append(LossPoint(first_step=low, last_step=high, loss=loss, evaluated=last))
    return tuple(found)


def _loss(reported: Sequence[ReportedRun]) -> tuple[Block, ...]:
    """Return the loss curves of the first runs that have one; with more, the chart is not readable."""
    falling = [one for one in reported if any(step.loss is not None for step in one.run.steps)]
    curves = [(one.name, loss_points(one.run)) for one in falling[:_MOST_CURVES]]
    if not curves:
        return ()
    said = [f"{name}: from {nats(points[0].loss)} to {nats(points[-1].loss)} nats" for name, points in curves]
    chart = Chart(
        title="Loss by step",
        description=f"Mean loss of stretches of steps; dots are of the validation split. {'; '.join(said)}.",
        drawing=Lines(
            x=Axis(label="optimizer steps", unit="count"),
            y=Axis(label="nats per predicted token (dots: validation)"),
            lines=tuple(line for number, curve in enumerate(curves) for line in _curve(*curve, number)),
        ),
        table=table_of(
            "The same as figures", [(name, point) for name, points in curves for point in points],
            ("run", "l", lambda one: one[0]),
            ("steps", "r", lambda one: f"{one[1].first_step:,} to {one[1].last_step:,}"),
            ("mean loss", "r", lambda one: nats(one[1].loss)),
            ("validation loss", "r", lambda one: nats(one[1].evaluated)),
            long=True,
        ),
    )  # fmt: skip
    return (chart, *_left_out(len(curves), len(falling), "curves of the loss", "the first; the JSON file has all"))


def _left_out(shown: int, of: int, what: str, which: str) -> tuple[Block, ...]:
    """Return a note if not all are shown."""
    return (Paragraph(words=(f"{shown:,} of {of:,} {what} are shown here, {which}.",)),) if shown < of else ()


def _curve(name: str, points: Sequence[LossPoint], colour: int) -> list[Line]:
    trained = tuple(Point(x=point.last_step, y=point.loss) for point in points if point.loss is not None)
    held = tuple(Point(x=point.last_step, y=point.evaluated) for point in points if point.evaluated is not None)
    lines = [Line(name=name, points=trained, kind="line", colour=colour)]
    return [*lines, Line(name="", points=held, kind="dots", colour=colour)] if held else lines


def _events(reported: Sequence[ReportedRun]) -> tuple[Block, ...]:
    """Return the latest events that need attention."""
    told = [(one.name, needs_attention(one.run)) for one in reported]
    latest = [(name, event) for name, events in told for event in events[-MOST_EVENTS:]]
    if not latest:
        return ()
    which = f"the latest {MOST_EVENTS} of a run at most; each run's record has all"
    table = table_of(
        "Events of runs", latest,
        ("run", "l", lambda one: one[0]),
        ("step", "r", lambda one: str(one[1].step)),
        ("kind", "l", lambda one: f"{one[1].level}: {one[1].kind}"),
        ("what happened", "l", lambda one: one[1].message),
        ("likely causes", "l", lambda one: "; ".join(one[1].causes) or None),
        ("done", "l", lambda one: one[1].action),
        ("next", "l", lambda one: one[1].next_step or None),
        long=len(latest) > LONG_TABLE_ROWS,
    )  # fmt: skip
    blocks = (*_left_out(len(latest), sum(len(events) for _, events in told), "events", which), table)
    return (Section(title="What needs attention", key="events", blocks=blocks),)


def steps(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Return the parts of a step during tuning and in the profile's runs, side by side."""
    tuning = [(found.source or "the tuning", found) for found in one.bottlenecks]
    of_runs = [(run.name, found) for run in runs if run.profile_path == one.path for found in run.bottlenecks]
    return _breakdown([*tuning, *of_runs], train_commands(one))


def runs_only(runs: Sequence[ReportedRun]) -> tuple[Block, ...]:
    """Return the parts of a step in runs whose profile is not in the report."""
    found = [(run.name, found) for run in runs for found in run.bottlenecks]
    if not found:
        return ()
    title = "Runs that have no profile in this report"
    return (Section(title=title, key="steps-of-runs", blocks=_breakdown(found, ())),)


def _breakdown(named: Sequence[tuple[str, Bottleneck]], commands: tuple[str, ...]) -> tuple[Block, ...]:
    """Return a bar for each, the parts as a table, and the bottleneck in words."""
    if not named:
        return (Missing(what="Where a step's time goes (the record of a run says)", commands=commands),)
    stacks, said = [], []
    for name, found in named:
        shares = {part.cause: part.share for part in found.parts}
        parts = tuple((words, shares[cause]) for cause, words in CAUSES.items() if shares.get(cause, 0.0) > 0)
        stacks.append((name, parts))
        told = ", ".join(f"{CAUSES[part.cause]} {format_share(part.share)}" for part in found.parts)
        said.append(f"{name}: {told}.")
    chart = Chart(
        title="Parts of a step",
        description=" ".join(said),
        drawing=Stacks(axis=Axis(label="share of a step", unit="share"), stacks=tuple(stacks)),
        table=table_of(
            "The same as figures", [(name, part) for name, found in named for part in found.parts],
            ("steps of", "l", lambda one: one[0]),
            ("time goes into", "l", lambda one: CAUSES[one[1].cause]),
            ("share", "r", lambda one: format_share(one[1].share)),
            ("95 % interval", "r", lambda one: bounds(one[1].low, one[1].high, format_share)),
            ("read from", "l", lambda one: one[1].source or None),
        ),
    )  # fmt: skip
    return (chart, Bullets(items=tuple(item for name, found in named for item in _limit(name, found))))


def _limit(name: str, found: Bottleneck) -> list[Words]:
    limit = "Nothing but computing" if found.limit == "compute" else CAUSES[found.limit].capitalize()
    decided = "" if found.decided else " (the interval leaves it open)"
    mfu = f"MFU {with_interval(found.mfu, format_share)}" if found.mfu else ""
    peak = mfu or "MFU is not known, as the device's peak is not"
    rest = f" limits it{decided}; {peak}; {plural(found.steps, 'reading')}."
    limited: Words = (f"{name}: ", Strong(text=limit), rest)
    return [limited, *((f"{name}: not told: {one}.",) for one in found.untold)]
