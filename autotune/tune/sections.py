"""Phases of a tuning while it runs, and its result, as text."""

import statistics
from collections.abc import Sequence

from autotune.base.document import Pairs, Paragraph
from autotune.base.render import console_text
from autotune.base.units import format_seconds
from autotune.profiles.values import Profile
from autotune.report.sections import summary_table
from autotune.trials.values import FinishedTrial, GradientSyncFigures, Measured, StepFigures, TrainingFigures
from autotune.tune.values import Stage, Status, TuningResult

_MARKS: dict[Status, str] = {"waiting": " ", "running": ">", "done": "+", "skipped": "-", "failed": "x"}
_NAMES, _TIMES = 10, 8


def stages_text(stages: Sequence[Stage], *, seconds: float, left_s: float, width: int) -> str:
    """Return phases, one per line of at most ``width`` characters, below the elapsed time and the time left."""
    models = max((len(one.model) for one in stages), default=0)
    over = sum(one.over for one in stages)
    left = "" if over == len(stages) else f", about {format_seconds(left_s)} left"
    lines = [f"tune: {over} of {len(stages)} phases, {format_seconds(seconds)} elapsed{left}"]
    for one in stages:
        took = format_seconds(one.seconds) if one.status in ("running", "done", "failed") else ""
        head = f" {_MARKS[one.status]} {one.name:<{_NAMES}}{one.model:<{models}}  {took:>{_TIMES}}  "
        lines.append(head + stage_words(one))
        if one.status == "running" and one.best:
            lines.append(" " * len(head) + f"best so far: {one.best}")
    return "\n".join(line if len(line) <= width else line[: max(0, width - 1)] + "…" for line in lines)


def stage_words(stage: Stage) -> str:
    """Return the progress or result of a phase in a few words."""
    if stage.status == "waiting":
        return "waiting"
    if stage.status != "running":
        return f"{stage.status}: {stage.summary}" if stage.status != "done" else stage.summary
    trials = f"{stage.done:g} of about {stage.expected:g}: " if stage.expected else ""
    return trials + stage.note.removeprefix(f"{stage.model}: ")


def best_words(finished: Sequence[FinishedTrial]) -> str:
    """Return the best of a phase's trials so far; empty until one has run."""
    ran = [(one, one.outcome) for one in finished if isinstance(one.outcome, Measured)]
    fitted = [
        int(one.trial.config["micro_batch_size"])
        for one, _ in ran
        if one.trial.job == "step" and one.trial.measured["memory_budget_bytes"]
    ]
    # Next to DataLoader workers, cached batches are an upper bound and no choice; a search has only cached ones.
    keeps_up = any(one.trial.job == "training" and not one.trial.measured["cached"] for one, _ in ran)
    rates = [
        (rate, one.label.split(" (")[0].split(": ", 1)[-1])
        for one, outcome in ran
        if not (keeps_up and one.trial.measured.get("cached")) and (rate := _rate(one, outcome)) is not None
    ]
    words = [f"{max(fitted)} sequences fit"] if fitted else []
    if rates:
        fastest, name = max(rates)
        words.append(f"{fastest:,.0f} tokens/s ({name})")
    return ", ".join(words)


def _rate(one: FinishedTrial, outcome: Measured) -> float | None:
    """Return a trial's tokens/s; None if it was not timed, or ran under a memory limit that slows it down."""
    job, measured = one.trial.job, one.trial.measured
    if not one.trial.is_timed:
        return None
    if job == "step" and (one.trial.config["device"] == "cuda" or measured["memory_budget_bytes"] is None):
        figures = StepFigures.of(outcome)
        return figures.padded_tokens_per_step / statistics.median(figures.step_s)
    if job == "training" and not measured.get("losses"):
        return TrainingFigures.of(outcome).tokens_per_s  # the share of padding depends on the layout
    if job == "gradient_sync":
        steps = GradientSyncFigures.of(outcome)
        return steps.tokens_per_step / statistics.median(steps.step_s)
    return None


def tuning_text(result: TuningResult, profiles: Sequence[Profile]) -> str:
    """Return the result of a tuning, its profiles as they are now, and the next commands."""
    table = summary_table(profiles, [one.train.model.name for one in profiles])
    note = ("tokens/s: non-padding; vs defaults, vs paper: speed-up; in parentheses: 95 % intervals",)
    pairs = [("profile", str(profile)) for profile in result.profiles]
    pairs += [] if result.report is None else [("report", str(result.report))]
    pairs += [
        ("not done", f"{one.name} of {one.model}: {one.summary}") for one in result.stages if one.status == "failed"
    ]
    pairs += [("next" if number == 0 else "then", step) for number, step in enumerate(result.next_steps)]
    said = Pairs(pairs=tuple((name, (words,)) for name, words in pairs))
    return console_text((*((table, Paragraph(words=note)) if profiles else ()), said))
