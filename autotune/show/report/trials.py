"""Every trial of a ledger."""

import statistics
from collections.abc import Sequence

from autotune.core.outcome import Measured, describe
from autotune.core.profile import Fingerprint
from autotune.core.trial import FeedFigures, FinishedTrial, StepFigures
from autotune.core.units import format_bytes, format_seconds
from autotune.decide.cost import ranks_of
from autotune.decide.physical import has_rate
from autotune.show.report.document import Block, Missing, Paragraph, Table, first_of
from autotune.show.report.figures import count
from autotune.show.report.inputs import ReportedProfile, part_of_each

_MOST_TRIALS = 2400
"""Of all profiles together."""


def trials_of_each(profiles: Sequence[ReportedProfile]) -> tuple[Block, ...]:
    """All, or as many of each profile as people can still read."""
    return part_of_each(profiles, "trials", lambda one: _trials(one, _MOST_TRIALS // len(profiles)))


def _trials(one: ReportedProfile, most: int) -> tuple[Block, ...]:
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
    kept, left = first_of(
        one.trials, most, f"trials of {one.title}", first=_says_no, which="those that failed before others"
    )
    peak = "peak" if one.profile.fingerprint.bytes_known == "measured" else "peak, allocator"
    table = Table(
        caption=f"Every trial of {one.title}",
        headers=("trial", "kind", "outcome", "ranks", "optimizer steps", peak, "slot tokens/s", "time", "detail"),
        rows=tuple(_cells(done, one.profile.fingerprint) for done in kept),
        align="lllrrrrrl",
        long=True,
    )
    return (*damaged, *left, table)


def _says_no(done: FinishedTrial) -> bool:
    return not isinstance(done.outcome, Measured)


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
