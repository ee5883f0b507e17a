"""A tuning as text: the table of its stages while it runs, and what it came to."""

import statistics
from collections.abc import Sequence

from autotune.core.outcome import Measured
from autotune.core.profile import Profile
from autotune.core.trial import ExchangeFigures, FeedFigures, FinishedTrial, StepFigures
from autotune.core.tuning import Stage, Status, TuningResult
from autotune.core.units import format_count, format_seconds
from autotune.decide.choose import deal
from autotune.show.exploration import exploration_text
from autotune.show.tables import text_table

_MARKS: dict[Status, str] = {"waiting": " ", "running": ">", "done": "+", "skipped": "-", "failed": "x"}
_NAMES, _TIMES = 10, 8


def stages_text(stages: Sequence[Stage], *, seconds: float, left_s: float, width: int) -> str:
    """All stages, one to a line, and how long the whole has taken and is going to take.

    Args:
        stages: In their order.
        seconds: Since the tuning began.
        left_s: About so long until it ends.
        width: Of the terminal; longer lines are cut.
    """
    models = max((len(one.model) for one in stages), default=0)
    over = sum(one.over for one in stages)
    left = "" if over == len(stages) else f", about {format_seconds(left_s)} left"
    lines = [f"tune: {over} of {len(stages)} stages, {format_seconds(seconds)} gone{left}"]
    for one in stages:
        took = format_seconds(one.seconds) if one.status in ("running", "done", "failed") else ""
        head = f" {_MARKS[one.status]} {one.name:<{_NAMES}}{one.model:<{models}}  {took:>{_TIMES}}  "
        lines.append(head + stage_words(one))
        if one.status == "running" and one.best:
            lines.append(" " * len(head) + f"best so far: {one.best}")
    return "\n".join(_cut(line, width) for line in lines)


def stage_words(stage: Stage) -> str:
    """What a stage does or came to, in a few words."""
    if stage.status == "waiting":
        return "waits"
    if stage.status != "running":
        return f"{stage.status}: {stage.told}" if stage.status != "done" else stage.told
    trials = f"{stage.done:g} of about {stage.expected:g}: " if stage.expected else ""
    return trials + stage.note.removeprefix(f"{stage.model}: ")


def best_words(finished: Sequence[FinishedTrial]) -> str:
    """The best of a stage's trials so far; empty while nothing ran."""
    ran = [(one, one.outcome) for one in finished if isinstance(one.outcome, Measured)]
    fitted = [_rows(one) for one, _ in ran if one.trial.job == "step" and one.trial.measured["memory_budget_bytes"]]
    # Beside loader workers batches from memory are a ceiling, and no choice; explored settings have no others.
    fed = any(one.trial.job == "feed" and not one.trial.measured["cached"] for one, _ in ran)
    rates = [
        (rate, one.label.split(" (")[0].split(": ", 1)[-1])
        for one, outcome in ran
        if not (fed and one.trial.measured.get("cached")) and (rate := _rate(one, outcome)) is not None
    ]
    words = [f"{max(fitted)} rows fit"] if fitted else []
    if rates:
        fastest, name = max(rates)
        words.append(f"{fastest:,.0f} tokens/s ({name})")
    return ", ".join(words)


def _rows(one: FinishedTrial) -> int:
    return int(one.trial.measured["config"]["micro_batch_rows"])


def _rate(one: FinishedTrial, outcome: Measured) -> float | None:
    """Tokens/s of a trial; None of one that was not timed, or that ran under a limit which slows it down."""
    job, measured = one.trial.job, one.trial.measured
    if not one.trial.is_timed:
        return None
    if job == "step" and (measured["config"]["device"] == "cuda" or measured["memory_budget_bytes"] is None):
        figures = StepFigures.of(outcome)
        return figures.slot_tokens_per_step / statistics.median(figures.step_s)
    if job == "feed" and not measured.get("losses"):
        return FeedFigures.of(outcome).real_tokens_per_s  # the same slots hold more or less, by layout
    if job == "exchange":
        steps = ExchangeFigures.of(outcome)
        return steps.real_tokens_per_step / statistics.median(steps.step_s)
    return None


HEADERS = (
    "model", "fits (rows)", "a step", "loader workers", "real tokens/s", "against default",
    "against paper-style",
)  # fmt: skip
ALIGN = "lrlrrrr"


def tuning_text(result: TuningResult, profiles: Sequence[Profile]) -> str:
    """What a tuning came to, and what to do next.

    Args:
        result: What the tuning says.
        profiles: As they are now, in the same order as there.
    """
    failed = [one for one in result.stages if one.status == "failed"]
    lines = [text_table(HEADERS, [_profile_cells(one) for one in profiles], align=ALIGN), ""] if profiles else []
    lines += [line for one in profiles for line in _explored(one)]
    lines += [f"profile: {profile}" for profile in result.profiles]
    lines += [] if result.report is None else [f"report: {result.report}"]
    lines += [f"not done: {one.name} of {one.model}: {one.told}" for one in failed]
    lines += [f"next: {step}" if number == 0 else f"then: {step}" for number, step in enumerate(result.next_steps)]
    return "\n".join(lines)


def _explored(profile: Profile) -> list[str]:
    """What an exploration found, under the model's name; nothing where there was none."""
    found = profile.evidence.explore
    return [] if found is None else [f"{profile.train.model.name}, explored", exploration_text(found), ""]


def _profile_cells(profile: Profile) -> list[str | None]:
    """What was decided for a model, and what that is worth; what was not measured is missing."""
    train, evidence = profile.train, profile.evidence
    ranks = 1 if evidence.probe is None else evidence.probe.local_ranks
    dealt = deal(train.global_batch_rows, train.micro_batch_rows, ranks)
    rows = [] if evidence.baseline is None else evidence.baseline.rows
    tuned = next((row.real_tokens_per_s for row in rows if row.name == "tuned"), [])
    against = {row.name: row.ratio_to_tuned for row in rows}
    step = f"{dealt.micro_batches} x {dealt.rows_per_micro_batch} rows" + (f" x {ranks} ranks" if ranks > 1 else "")
    return [
        train.model.name,
        None if evidence.probe is None else format_count(evidence.probe.feasible_max),
        step,
        None if evidence.workers is None else str(evidence.workers.chosen),
        format_count(statistics.median(tuned)) if tuned else None,
        _times(against.get("default")),
        _times(against.get("paper-style")),
    ]


def _times(ratio_to_tuned: float | None) -> str | None:
    return None if not ratio_to_tuned else f"{1 / ratio_to_tuned:.2f} x"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
