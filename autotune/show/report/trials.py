"""Every trial of a ledger, what they cost, and when that is paid back."""

import statistics

from autotune.core.interval import SHOWN_CONFIDENCE
from autotune.core.outcome import Measured, describe
from autotune.core.profile import Fingerprint
from autotune.core.trial import FeedFigures, FinishedTrial, StepFigures
from autotune.core.units import format_bytes, format_seconds
from autotune.decide.cost import LARGE_JOB_RANKS, PayBack, cost_rows, pay_back, ranks_of
from autotune.decide.physical import has_rate
from autotune.show.document import Block, Missing, Paragraph, Strong, Table, Words
from autotune.show.intervals import count, hours, with_bounds
from autotune.show.report.inputs import ReportedProfile


def trials(one: ReportedProfile) -> tuple[Block, ...]:
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
    table = Table(
        caption=f"Every trial of {one.title}",
        headers=("trial", "kind", "outcome", "ranks", "optimizer steps", peak, "slot tokens/s", "time", "detail"),
        rows=tuple(_cells(done, one.profile.fingerprint) for done in one.trials),
        align="lllrrrrrl",
        long=True,
    )
    return (*told, table)


def _cells(done: FinishedTrial, made_on: Fingerprint) -> list[str | None]:
    measured = isinstance(done.outcome, Measured)
    steps, peak, speed = _figures(done, made_on)
    return [
        done.label,
        done.trial.job,
        describe(done.outcome),
        str(ranks_of(done.trial.measured)),
        None if steps is None else str(steps),
        None if peak is None else format_bytes(peak),
        None if speed is None else count(speed),
        format_seconds(done.seconds),
        "" if measured else getattr(done.outcome, "detail", ""),
    ]


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


def cost(one: ReportedProfile) -> tuple[Block, ...]:
    """GPU-hours of all trials, and the training after which they are paid back."""
    rows = cost_rows(one.trials)
    if not rows:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (Missing(what="The cost (the ledger beside this report holds no trial)", commands=(tune,)),)
    spent_s = sum(row.rank_seconds for row in rows)
    unit = f"{one.unit}-hours"
    cells: list[list[str | None]] = [
        [row.job, str(row.trials), format_seconds(row.seconds), hours(row.rank_seconds / 3600)] for row in rows
    ]
    total = (str(sum(row.trials for row in rows)), format_seconds(sum(row.seconds for row in rows)))
    cells.append(["all", *total, hours(spent_s / 3600)])
    table = Table(
        caption="What the tuning cost", headers=("trials of", "number", "time", unit), rows=tuple(cells), align="lrrr"
    )
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
    after = with_bounds(found.rank_hours, found.rank_hours_low, found.rank_hours_high, hours, SHOWN_CONFIDENCE)
    large = hours(found.rank_hours / LARGE_JOB_RANKS)
    return (
        "Against transformers' Trainer it is paid back (predicted, if the measured ratio holds) after ",
        Strong(text=f"{after} of training on one {unit}"),
        f", shared among as many as there are: {large} on {LARGE_JOB_RANKS}.{doubt}",
    )
