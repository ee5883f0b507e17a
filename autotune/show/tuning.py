"""A tuning: its stages while it runs, what it came to and explored, and how all of them are doing."""

import statistics
from collections.abc import Iterator, Sequence

from autotune.core.exploration import ExploreEvidence
from autotune.core.outcome import Measured
from autotune.core.profile import Profile
from autotune.core.trial import ExchangeFigures, FeedFigures, FinishedTrial, StepFigures
from autotune.core.tuning import RunStanding, Stage, Status, TuningResult, TuningStanding
from autotune.core.units import format_count, format_seconds
from autotune.decide.choose import deal
from autotune.show.document import Block, Missing, Pairs, Paragraph, Section, Table, told
from autotune.show.intervals import number, of_windows
from autotune.show.report.inputs import ReportedProfile
from autotune.show.text import console_text

_MARKS: dict[Status, str] = {"waiting": " ", "running": ">", "done": "+", "skipped": "-", "failed": "x"}
_NAMES, _TIMES = 10, 8


def stages_text(stages: Sequence[Stage], *, seconds: float, left_s: float, width: int) -> str:
    """All stages, one to a line of at most ``width``; since when the whole runs, and about how long it still takes."""
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
    return "\n".join(line if len(line) <= width else line[: max(0, width - 1)] + "…" for line in lines)


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
    fitted = [
        int(one.trial.measured["config"]["micro_batch_rows"])
        for one, _ in ran
        if one.trial.job == "step" and one.trial.measured["memory_budget_bytes"]
    ]
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


def tuning_text(result: TuningResult, profiles: Sequence[Profile]) -> str:
    """What a tuning came to, its profiles as they are now, and what to do next."""
    table = profiles_table(profiles, [one.train.model.name for one in profiles])
    explored = tuple(
        Section(
            title=f"{one.train.model.name}, explored", key="", blocks=(told(exploration_lines(one.evidence.explore)),)
        )
        for one in profiles
        if one.evidence.explore is not None
    )
    pairs = [("profile", str(profile)) for profile in result.profiles]
    pairs += [] if result.report is None else [("report", str(result.report))]
    pairs += [("not done", f"{one.name} of {one.model}: {one.told}") for one in result.stages if one.status == "failed"]
    pairs += [("next" if number == 0 else "then", step) for number, step in enumerate(result.next_steps)]
    said = Pairs(pairs=tuple((name, (words,)) for name, words in pairs))
    return console_text((*((table,) if profiles else ()), *explored, said))


def profiles_table(profiles: Sequence[Profile], names: Sequence[str]) -> Table:
    """What was decided for each, and what that is worth, side by side."""
    return Table(
        caption="",
        headers=("model", "fits (rows)", "a step", "loader workers", "real tokens/s", "against HF Trainer",
                 "against paper"),
        rows=tuple([name, *_profile_cells(one)] for name, one in zip(names, profiles, strict=True)),
        align="lrlrrrr",
    )  # fmt: skip


def _profile_cells(profile: Profile) -> list[str | None]:
    """What was decided for a model, and what that is worth; what was not measured is missing."""
    train, evidence = profile.train, profile.evidence
    ranks = 1 if evidence.probe is None else evidence.probe.local_ranks
    dealt = deal(train.global_batch_rows, train.micro_batch_rows, ranks)
    rows = [] if evidence.baseline is None else evidence.baseline.rows
    tuned = next((row.real_tokens_per_s for row in rows if row.name == "tuned"), [])
    against = {row.name: row.speedup for row in rows}
    step = f"{dealt.micro_batches} x {dealt.rows_per_micro_batch} rows" + (f" x {ranks} ranks" if ranks > 1 else "")
    return [
        None if evidence.probe is None else format_count(evidence.probe.feasible_max),
        step,
        None if evidence.workers is None else str(evidence.workers.chosen),
        format_count(statistics.median(tuned)) if tuned else None,
        _times(against.get("hf-trainer")),
        _times(against.get("paper")),
    ]


def _times(speedup: float | None) -> str | None:
    return None if speedup is None else f"{speedup:.2f} x"


def exploration_text(found: ExploreEvidence) -> str:
    """What came of it and why."""
    return console_text((told(exploration_lines(found)),))


def exploration_section(one: ReportedProfile) -> tuple[Block, ...]:
    """The search, its answer and its trials: the fastest first, what did not run last."""
    found = one.profile.evidence.explore
    if found is None:
        command = f"autotune tune --model {one.name} --data DIR --explore"
        what = "Other settings of the step, searched together"
        return (Missing(what=what, state="not asked for", commands=(command,)),)
    rows = sorted(found.rows, key=lambda row: -(row.ratio_to_unexplored or (row.settings == found.unexplored)))
    table = Table(
        caption="Settings that were tried, against the unexplored ones in the same round",
        headers=("settings", "windows", "real tokens/s (median)", "of the unexplored", "outcome"),
        rows=tuple(
            [
                row.settings.name,
                str(row.windows),
                None if row.real_tokens_per_s is None else format_count(row.real_tokens_per_s),
                None if row.ratio_to_unexplored is None else f"{row.ratio_to_unexplored:.3f}",
                row.outcome,
            ]
            for row in rows
        ),
        align="lrrrl",
        long=True,
    )
    return (told(exploration_lines(found)), table)


def exploration_lines(found: ExploreEvidence) -> Iterator[str]:
    """A line each: the answer, how sure it is, and what it rests on."""
    yield f"settings of the step: {found.choice}"
    if found.candidate != found.unexplored:
        ratio = of_windows(found.ratio, number)
        yield f"{ratio} times the real tokens/s of {found.unexplored.name}, by {found.candidate.name}"
    if found.equal_loss is not None:
        yield f"loss: {found.equal_loss}"
    looked = f", {found.pruned} of them for one short window" if found.pruned else ""
    yield (
        f"tried: {format_count(found.trials)} of {format_count(found.cells - 1)} other ways to train{looked}; "
        f"{format_count(found.windows)} windows in {format_seconds(found.seconds)}"
    )
    yield f"the search stopped because {found.stopped_because}"
    yield from (f"not explored: {one}" for one in found.left_out)


def standings_text(runs: Sequence[RunStanding], tunings: Sequence[TuningStanding], *, asked: bool) -> str:
    """Two tables, and why runs ended; whether SLURM was ``asked`` for their jobs."""
    ran = Table(
        caption="",
        headers=("run", "state", "job", "step", "real tokens/s", "last checkpoint", "last step ago"),
        rows=tuple(
            (
                run.directory,
                run.state,
                run.job,
                None if run.step is None else f"{format_count(run.step)}/{format_count(run.max_steps)}",
                format_count(run.real_tokens_per_s),
                run.checkpoint,
                None if run.seconds_since_step is None else format_seconds(run.seconds_since_step),
            )
            for run in runs
        ),
        align="lllrrlr",
    )
    tuned = Table(
        caption="",
        headers=("tuning", "trials", "outcomes", "newest (UTC)", "newest trial"),
        rows=tuple(
            (
                one.directory,
                format_count(one.trials),
                ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(one.outcomes.items())),
                one.newest_utc,
                one.newest,
            )
            for one in tunings
        ),
        align="lr",
    )
    ended = [f"{run.directory}: {run.reason}" for run in runs if run.reason and run.state != "finished"]
    notes = [
        f"{one.directory}: {one.damaged_lines} lines of its ledger cannot be read"
        for one in tunings
        if one.damaged_lines
    ]
    notes += [] if runs or tunings else ["no runs and no tunings here"]
    notes += [] if asked else ["SLURM cannot be asked from here: states are those of the records alone"]
    blocks: list[Block] = [ran] if runs else []
    blocks += [Paragraph(words=(line,)) for line in ended]
    blocks += [tuned] if tunings else []
    blocks += [Paragraph(words=(line,)) for line in notes]
    return console_text(blocks)
