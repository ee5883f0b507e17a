"""Every trial of a ledger."""

import statistics

from autotune.core.outcome import Measured, describe
from autotune.core.trial import FeedFigures, FinishedTrial, StepFigures
from autotune.core.units import format_bytes, format_seconds
from autotune.show.report.cost import ranks_of
from autotune.show.report.document import Block, Missing, Paragraph, Table
from autotune.show.report.figures import count
from autotune.show.report.inputs import ReportedProfile


def trials(one: ReportedProfile) -> tuple[Block, ...]:
    """In the order in which they were measured."""
    damaged: tuple[Block, ...] = ()
    if one.damaged_lines:
        said = f"Lines of the ledger that could not be read and were left out: {one.damaged_lines}."
        damaged = (Paragraph(words=(said,)),)
    if one.ledger is not None and one.ledger.others:
        said = "Trials of another profile of this name, in the same ledger, neither shown nor counted"
        damaged = (*damaged, Paragraph(words=(f"{said}: {one.ledger.others}.",)))
    if not one.trials:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (*damaged, Missing(what="Trials (the ledger beside this report holds none)", commands=(tune,)))
    table = Table(
        caption=f"Every trial of {one.path.stem}",
        headers=("trial", "kind", "outcome", "ranks", "optimizer steps", "peak", "slot tokens/s", "time", "detail"),
        rows=tuple(_cells(done) for done in one.trials),
        align="lllrrrrrl",
        long=True,
    )
    return (*damaged, table)


def _cells(done: FinishedTrial) -> list[str | None]:
    measured = isinstance(done.outcome, Measured)
    steps, peak, speed = _figures(done)
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


def _figures(done: FinishedTrial) -> tuple[int | None, int | None, float | None]:
    """Steps, peak bytes and slot tokens/s, where the kind of trial has them."""
    if not isinstance(done.outcome, Measured):
        return None, None, None
    if done.trial.job == "step":
        step = StepFigures.of(done.outcome)
        median_s = statistics.median(step.step_s) if step.step_s else 0.0
        return step.optimizer_steps, step.peak_bytes, step.slot_tokens_per_step / median_s if median_s else None
    if done.trial.job == "feed":
        feed = FeedFigures.of(done.outcome)
        return feed.optimizer_steps, feed.memory_bytes, feed.slot_tokens_per_s
    return None, None, None
