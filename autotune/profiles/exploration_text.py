"""The result of a joint search, as text."""

from collections.abc import Iterator

from autotune.base.document import bulleted
from autotune.base.render_console import console_text
from autotune.base.units import format_count, format_seconds
from autotune.base.wording import format_ratio, format_windows
from autotune.evidence.explore import ExploreEvidence


def exploration_text(explore: ExploreEvidence) -> str:
    """Return the result of a search and its reasons, for the console."""
    return console_text((bulleted(exploration_lines(explore)),))


def exploration_lines(explore: ExploreEvidence) -> Iterator[str]:
    """Yield a line each on the result, its confidence, and the trials behind it."""
    yield f"configuration of the step: {explore.choice}"
    if explore.candidate != explore.starting:
        yield _comparison(explore)
    if explore.equal_loss is not None:
        yield f"loss: {explore.equal_loss}"
    pruned = ""
    if explore.pruned:
        pruned = f", {explore.pruned} of them in one short window"
    yield (
        f"tried {format_count(explore.trials)} of"
        f" {format_count(explore.configurations - 1)} other configurations{pruned};"
        f" {format_count(explore.windows)} windows in"
        f" {format_seconds(explore.seconds)}"
    )
    yield f"reason to stop: {explore.stopped_because}"
    yield from (f"not searched: {reason}" for reason in explore.left_out)


def _comparison(explore: ExploreEvidence) -> str:
    """Return the candidate's ratio to the starting configuration, as a sentence."""
    ratio = format_windows(explore.ratio, format_ratio)
    row = explore.candidate_row
    predicted = ""
    if row is not None and row.predicted_ratio is not None:
        predicted = f" (predicted: {format_ratio(row.predicted_ratio)})"
    return (
        f"{explore.candidate.name} has {ratio} times the throughput of"
        f" {explore.starting.name}{predicted}"
    )
