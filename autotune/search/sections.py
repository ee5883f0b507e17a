"""Report sections on the joint search of a step's settings."""

from collections.abc import Iterator

from autotune.base.document import Block, Missing, bulleted, table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_count, format_seconds
from autotune.base.wording import format_ratio, format_windows
from autotune.evidence.explore import ExploreEvidence
from autotune.report.values import ReportedProfile


def exploration_text(found: ExploreEvidence) -> str:
    """Return the result of a search and its reasons, for the console."""
    return console_text((bulleted(exploration_lines(found)),))


def exploration_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the search's result and trials, the fastest first, failed ones last."""
    found = one.profile.evidence.explore
    if found is None:
        command = f"autotune tune --model {one.name} --data DIR --explore"
        return (
            Missing(
                subject="Joint search of the step's settings",
                state="not requested",
                commands=(command,),
            ),
        )
    predicted = (
        "predicted ratio",
        "r",
        lambda row: None if (one := row.predicted_ratio) is None else f"{one:.3f}",
    )
    table = table_of(
        "Configurations that were tried; tokens/s exclude padding, ratios are to the"
        " starting one in the same round",
        sorted(
            found.rows,
            key=lambda row: (
                -(row.ratio_to_starting or (row.settings == found.starting))
            ),
        ),
        ("configuration", "l", lambda row: row.settings.name),
        ("windows", "r", lambda row: str(row.windows)),
        ("tokens/s (median)", "r", lambda row: format_count(row.tokens_per_s)),
        (
            "ratio",
            "r",
            lambda row: (
                None if (one := row.ratio_to_starting) is None else f"{one:.3f}"
            ),
        ),
        *([predicted] if any(row.predicted_ratio for row in found.rows) else []),
        (
            "outcome",
            "l",
            lambda row: "completed" if row.outcome == "ran" else row.outcome,
        ),
        long=True,
    )
    return (bulleted(exploration_lines(found)), table)


def exploration_lines(found: ExploreEvidence) -> Iterator[str]:
    """Yield a line each on the result, its confidence, and the trials behind it."""
    yield f"configuration of the step: {found.choice}"
    if found.candidate != found.starting:
        times = format_windows(found.ratio, format_ratio)
        ratio = f"{times} times the non-padding tokens/s"
        known = [
            row.predicted_ratio
            for row in found.rows
            if row.settings == found.candidate and row.predicted_ratio
        ]
        predicted = f" (predicted: {format_ratio(known[0])})" if known else ""
        yield f"{found.candidate.name} has {ratio} of {found.starting.name}{predicted}"
    if found.equal_loss is not None:
        yield f"loss: {found.equal_loss}"
    looked = f", {found.pruned} of them in one short window" if found.pruned else ""
    yield (
        f"tried {format_count(found.trials)} of"
        f" {format_count(found.configurations - 1)} other configurations{looked};"
        f" {format_count(found.windows)} windows in {format_seconds(found.seconds)}"
    )
    yield f"reason to stop: {found.stopped_because}"
    yield from (f"not searched: {one}" for one in found.left_out)
