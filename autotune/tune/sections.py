"""Phases of a tuning while it runs, and its result, as text."""

from collections.abc import Sequence

from autotune.base.document import Block, Pairs, Paragraph
from autotune.base.render_console import console_text
from autotune.base.units import format_seconds
from autotune.evidence.profile import Profile, fill_share
from autotune.report.sections import summary_table
from autotune.trials.job_figures import WindowFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import FinishedTrial
from autotune.tune.values import Stage, Status, TuningResult

_MARKS: dict[Status, str] = {
    "waiting": " ",
    "running": ">",
    "done": "+",
    "skipped": "-",
    "failed": "x",
    "interrupted": "x",
}
_NAMES, _TIMES = 10, 8


def stages_text(
    stages: Sequence[Stage],
    *,
    seconds: float,
    left_s: float,
    width: int,
    interrupted: bool = False,
) -> str:
    """Return phases, one per line, below the elapsed time and the time left.

    A line has at most ``width`` characters. Without phases, torch is loading; after an
    interrupt, no time is left to show.
    """
    models = max((len(one.model) for one in stages), default=0)
    over = sum(one.over for one in stages)
    left = ""
    if over < len(stages):
        left = ", longer than expected"
        if left_s > 0:
            left = f", about {format_seconds(left_s)} left"
    elapsed = format_seconds(seconds)
    if interrupted:
        heading = f"tune: interrupted after {elapsed}"
    elif not stages:
        heading = f"tune: loading torch, {elapsed} elapsed"
    else:
        heading = f"tune: {over} of {len(stages)} phases, {elapsed} elapsed{left}"
    lines = [heading]
    for one in stages:
        took = (
            format_seconds(one.seconds)
            if one.status in ("running", "done", "failed", "interrupted")
            else ""
        )
        head = (
            f" {_MARKS[one.status]} {one.name:<{_NAMES}}{one.model:<{models}} "
            f" {took:>{_TIMES}}  "
        )
        lines.append(head + stage_words(one))
        if one.status == "running" and one.best:
            lines.append(" " * len(head) + f"best so far: {one.best}")
    return "\n".join(
        line if len(line) <= width else line[: max(0, width - 1)] + "…"
        for line in lines
    )


def stage_words(stage: Stage) -> str:
    """Return the progress or result of a phase in a few words."""
    if stage.status == "waiting":
        return "waiting"
    if stage.status != "running":
        return (
            f"{stage.status}: {stage.summary}"
            if stage.status != "done"
            else stage.summary
        )
    trials = f"{stage.done:g} of about {stage.expected:g}: " if stage.expected else ""
    return trials + stage.note.removeprefix(f"{stage.model}: ")


def best_words(finished: Sequence[FinishedTrial]) -> str:
    """Return the fastest of a phase's windows of training so far.

    It is empty until one has run.
    """
    windows = [
        (WindowFigures.of(one.outcome), one)
        for one in finished
        if one.trial.job == "window"
        and isinstance(one.outcome, Measured)
        and not one.trial.step_arguments.get("losses")
    ]
    # Next to DataLoader workers, cached batches are an upper bound and no choice; a
    # search has only cached ones.
    loaded = [window for window in windows if not window[1].trial.measured["cached"]]
    if not windows:
        return ""
    figures, best = max(loaded or windows, key=lambda window: window[0].units_per_s)
    rate = f"{figures.units_per_s:,.0f} {figures.unit}/s"
    return f"{rate} ({best.label.split(' (')[0].split(': ', 1)[-1]})"


def tuning_text(result: TuningResult, profiles: Sequence[Profile]) -> str:
    """Return the result of a tuning.

    It shows the profiles as they are now, and the next commands.
    """
    pairs = [("profile", str(profile)) for profile in result.profiles]
    pairs += [] if result.report is None else [("report", str(result.report))]
    failed = (stage for stage in result.stages if stage.status == "failed")
    pairs += [
        ("not done", f"{one.name} of {one.model}: {one.summary}") for one in failed
    ]
    pairs += [
        ("next" if number == 0 else "then", step)
        for number, step in enumerate(result.next_steps)
    ]
    said = Pairs(pairs=tuple((name, (words,)) for name, words in pairs))
    return console_text((*_summary(profiles), said))


def _summary(profiles: Sequence[Profile]) -> tuple[Block, ...]:
    """Return the table of tuned settings and their throughput."""
    if not profiles:
        return ()
    note = "vs: speedup over a baseline; in parentheses: 95 % intervals"
    if any(fill_share(profile) is not None for profile in profiles):
        note = f"tokens/s: non-padding; {note}"
    return (summary_table(profiles), Paragraph(words=(note,)))
