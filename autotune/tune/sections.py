"""A tuning: its stages while it runs, what it came to and explored, how all are doing, every trial and its cost."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from autotune.base.document import Block, Missing, Pairs, Paragraph, Section, Strong, Table, Words, table_of, told
from autotune.base.interval import SHOWN_CONFIDENCE, Interval
from autotune.base.render import console_text
from autotune.base.units import format_bytes, format_count, format_seconds
from autotune.base.wording import count, hours, number, of_windows, with_interval
from autotune.baseline.decide.pay_back import LARGE_JOB_RANKS, CostRow, PayBack, cost_rows, pay_back, row_of
from autotune.memory.decide.batch_choice import deal
from autotune.profiles.evidence import RecipeRow
from autotune.profiles.values import Fingerprint, Profile
from autotune.report.values import ReportedProfile
from autotune.search.values import ExploreEvidence
from autotune.trials.decide.plausibility import has_rate
from autotune.trials.outcome import Measured, describe
from autotune.trials.values import ExchangeFigures, FeedFigures, FinishedTrial, StepFigures
from autotune.tune.values import RunStanding, Stage, Status, TuningResult, TuningStanding

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
        int(one.trial.config["micro_batch_rows"])
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
    if job == "step" and (one.trial.config["device"] == "cuda" or measured["memory_budget_bytes"] is None):
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
    """What was decided for each, and what that is worth, side by side; what was not measured is missing."""
    return table_of(
        "", zip(names, profiles, strict=True),
        ("model", "l", lambda one: one[0]),
        ("fits (rows)", "r", lambda one: f"{found.feasible_max:,}" if (found := one[1].evidence.probe) else None),
        ("a step", "l", lambda one: _step(one[1])),
        ("loader workers", "r", lambda one: str(found.chosen) if (found := one[1].evidence.workers) else None),
        ("real tokens/s", "r", lambda one: _speed(row_of(one[1].evidence.baseline, "tuned"))),
        ("against HF Trainer", "r", lambda one: _times(row_of(one[1].evidence.baseline, "hf-trainer"))),
        ("against paper", "r", lambda one: _times(row_of(one[1].evidence.baseline, "paper"))),
    )  # fmt: skip


def _step(profile: Profile) -> str:
    train, ranks = profile.train, 1 if profile.evidence.probe is None else profile.evidence.probe.local_ranks
    dealt = deal(train.global_batch_rows, train.micro_batch_rows, ranks)
    return f"{dealt.micro_batches} x {dealt.rows_per_micro_batch} rows" + (f" x {ranks} ranks" if ranks > 1 else "")


def _speed(row: RecipeRow | None) -> str | None:
    return format_count(statistics.median(row.real_tokens_per_s)) if row and row.real_tokens_per_s else None


def _times(row: RecipeRow | None) -> str | None:
    return None if row is None or row.speedup is None else f"{row.speedup:.2f} x"


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
    table = table_of(
        "Settings that were tried, against the unexplored ones in the same round",
        sorted(found.rows, key=lambda row: -(row.ratio_to_unexplored or (row.settings == found.unexplored))),
        ("settings", "l", lambda row: row.settings.name),
        ("windows", "r", lambda row: str(row.windows)),
        ("real tokens/s (median)", "r", lambda row: format_count(row.real_tokens_per_s)),
        ("of the unexplored", "r", lambda row: None if (one := row.ratio_to_unexplored) is None else f"{one:.3f}"),
        ("outcome", "l", lambda row: row.outcome),
        long=True,
    )  # fmt: skip
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
    ran = table_of(
        "", runs,
        ("run", "l", lambda run: run.directory),
        ("state", "l", lambda run: run.state),
        ("job", "l", lambda run: run.job),
        ("step", "r", lambda run: None if run.step is None else f"{run.step:,}/{format_count(run.max_steps)}"),
        ("real tokens/s", "r", lambda run: format_count(run.real_tokens_per_s)),
        ("last checkpoint", "l", lambda run: run.checkpoint),
        ("last step ago", "r", lambda run: format_seconds(run.seconds_since_step)),
    )  # fmt: skip
    tuned = table_of(
        "", tunings,
        ("tuning", "l", lambda one: one.directory),
        ("trials", "r", lambda one: format_count(one.trials)),
        ("outcomes", "l", lambda one: _counted(one.outcomes)),
        ("newest (UTC)", "l", lambda one: one.newest_utc),
        ("newest trial", "l", lambda one: one.newest),
    )  # fmt: skip
    ended = [f"{run.directory}: {run.reason}" for run in runs if run.reason and run.state != "finished"]
    lost = [(one.directory, one.damaged_lines) for one in tunings if one.damaged_lines]
    notes = [f"{directory}: {lines} lines of its ledger cannot be read" for directory, lines in lost]
    notes += [] if runs or tunings else ["no runs and no tunings here"]
    notes += [] if asked else ["SLURM cannot be asked from here: states are those of the records alone"]
    blocks: list[Block] = [ran] if runs else []
    blocks += [Paragraph(words=(line,)) for line in ended]
    blocks += [tuned] if tunings else []
    blocks += [Paragraph(words=(line,)) for line in notes]
    return console_text(blocks)


def _counted(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(outcomes.items()))


def trials_section(one: ReportedProfile) -> tuple[Block, ...]:
    """In the order in which they were measured."""
    notes = {
        "Lines of the ledger that could not be read and were left out": one.damaged_lines,
        "Trials of another profile of this name, in the same ledger, neither shown nor counted": (
            0 if one.ledger is None else one.ledger.others
        ),
    }
    told = tuple(Paragraph(words=(f"{note}: {number}.",)) for note, number in notes.items() if number)
    if not one.trials:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (*told, Missing(what="Trials (the ledger beside this report holds none)", commands=(tune,)))
    peak = "peak" if one.profile.fingerprint.bytes_known == "measured" else "peak, allocator"
    table = table_of(
        f"Every trial of {one.title}", [(done, _figures(done, one.profile.fingerprint)) for done in one.trials],
        ("trial", "l", lambda one: one[0].label),
        ("kind", "l", lambda one: one[0].trial.job),
        ("outcome", "l", lambda one: describe(one[0].outcome)),
        ("ranks", "r", lambda one: str(one[0].trial.ranks)),
        ("optimizer steps", "r", lambda one: None if one[1][0] is None else str(one[1][0])),
        (peak, "r", lambda one: format_bytes(one[1][1])),
        ("slot tokens/s", "r", lambda one: None if one[1][2] is None else count(one[1][2])),
        ("time", "r", lambda one: format_seconds(one[0].seconds)),
        ("detail", "l", lambda one: getattr(one[0].outcome, "detail", "")),
        long=True,
    )  # fmt: skip
    return (*told, table)


def _figures(done: FinishedTrial, made_on: Fingerprint) -> tuple[int | None, int | None, float | None]:
    """Steps, peak bytes and slot tokens/s, if the kind of trial has them."""
    if not isinstance(done.outcome, Measured):
        return None, None, None
    rated = has_rate(done.trial, done.outcome, gpu_name=made_on.gpu_name, driver=made_on.driver)
    if done.trial.job == "step":
        step = StepFigures.of(done.outcome)
        median_s = statistics.median(step.step_s) if rated and step.step_s else 0.0
        return step.optimizer_steps, step.peak_bytes, step.slot_tokens_per_step / median_s if median_s else None
    if done.trial.job == "feed":
        feed = FeedFigures.of(done.outcome)
        return feed.optimizer_steps, feed.memory_bytes, feed.slot_tokens_per_s if rated else None
    return None, None, None


def cost_section(one: ReportedProfile) -> tuple[Block, ...]:
    """GPU-hours of all trials, and the training after which they are paid back."""
    rows = cost_rows(one.trials)
    if not rows:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (Missing(what="The cost (the ledger beside this report holds no trial)", commands=(tune,)),)
    spent_s = sum(row.rank_seconds for row in rows)
    unit = f"{one.unit}-hours"
    trials, seconds = sum(row.trials for row in rows), sum(row.seconds for row in rows)
    table = table_of(
        "What the tuning cost", (*rows, CostRow(job="all", trials=trials, seconds=seconds, rank_seconds=spent_s)),
        ("trials of", "l", lambda row: row.job),
        ("number", "r", lambda row: str(row.trials)),
        ("time", "r", lambda row: format_seconds(row.seconds)),
        (unit, "r", lambda row: hours(row.rank_seconds / 3600)),
    )  # fmt: skip
    said = (
        f"All trials of the ledger took {hours(spent_s / 3600)} of one {one.unit} "
        f"({unit}: time of each trial times the ranks that it kept busy; not the start of jobs, nor what lay idle "
        "beside a trial). "
    )
    found = pay_back(spent_s, one.profile.evidence.baseline)
    if found is None:
        command = f"autotune baseline --profile {one.quoted}"
        return (Paragraph(words=(said,)), table, Missing(what="When that is paid back", commands=(command,)))
    return (Paragraph(words=(said, *_paid(found, one.unit))), table)


def _paid(found: PayBack, unit: str) -> Words:
    if found.rank_hours is None:
        undecided = found.rank_hours_low is not None
        why = "it is undecided whether they are faster" if undecided else "the tuned settings are not faster"
        return (f"Against transformers' Trainer it is not paid back by speed: {why}.",)
    open_end = found.rank_hours_low is not None and found.rank_hours_high is None
    doubt = " At the far end of the interval it never is." if open_end else ""
    spent = Interval.of(found.rank_hours, found.rank_hours_low, found.rank_hours_high, SHOWN_CONFIDENCE)
    large = hours(found.rank_hours / LARGE_JOB_RANKS)
    return (
        "Against transformers' Trainer it is paid back (predicted, if the measured ratio holds) after ",
        Strong(text=f"{with_interval(spent, hours)} of training on one {unit}"),
        f", shared among as many as there are: {large} on {LARGE_JOB_RANKS}.{doubt}",
    )
