"""What an exploration of the step's settings found, as text."""

from collections.abc import Iterator

from autotune.core.exploration import ExploredRow, ExploreEvidence
from autotune.core.units import format_count, format_seconds
from autotune.show.intervals import of_windows
from autotune.show.tables import inert

ROW_HEADERS = ("settings", "windows", "real tokens/s (median)", "of the unexplored", "outcome")
ROW_ALIGN = "lrrrl"


def exploration_text(found: ExploreEvidence) -> str:
    """What was tried, what came of it and why."""
    return "\n".join(map(inert, exploration_lines(found)))


def exploration_lines(found: ExploreEvidence) -> Iterator[str]:
    """A line each: the answer, how sure it is, and what it rests on."""
    yield f"settings of the step: {found.choice}"
    if found.candidate != found.unexplored:
        yield f"{candidate_ratio(found)} the real tokens/s of {found.unexplored.name}, by {found.candidate.name}"
    if found.equal_loss is not None:
        yield f"loss: {found.equal_loss}"
    looked = f", {found.pruned} of them for one short window" if found.pruned else ""
    yield (
        f"tried: {format_count(found.trials)} of {format_count(found.cells - 1)} other ways to train{looked}; "
        f"{format_count(found.windows)} windows in {format_seconds(found.seconds)}"
    )
    yield f"the search stopped because {found.stopped_because}"
    yield from (f"not explored: {one}" for one in found.left_out)


def candidate_ratio(found: ExploreEvidence) -> str:
    """``1.32 (1.25 to 1.41, 98 %) times``."""
    return f"{of_windows(found.ratio, _ratio)} times"


def row_cells(row: ExploredRow) -> list[str | None]:
    """The row of settings that were tried."""
    return [
        row.settings.name,
        str(row.windows),
        None if row.real_tokens_per_s is None else format_count(row.real_tokens_per_s),
        None if row.ratio_to_unexplored is None else f"{row.ratio_to_unexplored:.3f}",
        row.outcome,
    ]


def _ratio(value: float) -> str:
    return f"{value:.2f}"
