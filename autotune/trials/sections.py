"""Report section on trials and their outcomes."""

import statistics

from autotune.base.document import Block, Missing, Paragraph, table_of
from autotune.base.units import format_bytes, format_seconds
from autotune.base.wording import format_number
from autotune.profiles.values import Fingerprint
from autotune.report.values import ReportedProfile
from autotune.trials.decide.plausibility import has_rate
from autotune.trials.values import (
    FinishedTrial,
    Measured,
    StepFigures,
    TrainingFigures,
    describe,
)


def trials_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the table of all trials, in the order in which they were measured."""
    notes = {
        "Unreadable lines of the trial log, ignored": one.corrupt_lines,
        "Trials of another profile with the same name, ignored": (
            0 if one.trial_log is None else one.trial_log.others
        ),
    }
    told = tuple(
        Paragraph(words=(f"{note}: {number}.",))
        for note, number in notes.items()
        if number
    )
    if not one.trials:
        tune = f"autotune tune --model {one.name} --data DIR"
        return (
            *told,
            Missing(subject="Trials (none in the trial log)", commands=(tune,)),
        )
    peak = (
        "peak memory"
        if one.profile.fingerprint.bytes_known == "measured"
        else "peak memory, allocator"
    )
    table = table_of(
        "Trials",
        [(done, _figures(done, one.profile.fingerprint)) for done in one.trials],
        ("trial", "l", lambda one: one[0].label),
        ("kind", "l", lambda one: one[0].trial.job),
        ("outcome", "l", lambda one: describe(one[0].outcome)),
        ("ranks", "r", lambda one: str(one[0].trial.ranks)),
        (
            "optimizer steps",
            "r",
            lambda one: None if one[1][0] is None else str(one[1][0]),
        ),
        (peak, "r", lambda one: format_bytes(one[1][1])),
        (
            "tokens/s incl. padding",
            "r",
            lambda one: None if one[1][2] is None else format_number(one[1][2]),
        ),
        ("time", "r", lambda one: format_seconds(one[0].seconds)),
        (
            "detail",
            "l",
            lambda one: (
                getattr(one[0].outcome, "detail", "")
                * (one[0].outcome.kind != "out_of_memory")
            ),
        ),
        long=True,
    )
    return (*told, table)


def _figures(
    done: FinishedTrial, made_on: Fingerprint
) -> tuple[int | None, int | None, float | None]:
    """Return steps, peak bytes and tokens/s including padding, if the kind of trial has them."""
    if not isinstance(done.outcome, Measured):
        return None, None, None
    rated = has_rate(
        done.trial, done.outcome, gpu_name=made_on.gpu_name, driver=made_on.driver
    )
    if done.trial.job == "step":
        step = StepFigures.of(done.outcome)
        median_s = statistics.median(step.step_s) if rated and step.step_s else 0.0
        return (
            step.optimizer_steps,
            step.peak_bytes,
            step.padded_tokens_per_step / median_s if median_s else None,
        )
    if done.trial.job == "training":
        feed = TrainingFigures.of(done.outcome)
        return (
            feed.optimizer_steps,
            feed.memory_bytes,
            feed.padded_tokens_per_s if rated else None,
        )
    return None, None, None
