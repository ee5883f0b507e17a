"""The result of a joint search, as text."""

from collections.abc import Iterator

from autotune.base.document import bulleted
from autotune.base.render_console import console_text
from autotune.base.units import format_count, format_seconds
from autotune.base.wording import format_ratio, format_windows
from autotune.evidence.explore import ExploreEvidence


def exploration_text(found: ExploreEvidence) -> str:
    """Return the result of a search and its reasons, for the console."""
    return console_text((bulleted(exploration_lines(found)),))


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
