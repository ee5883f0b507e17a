"""What the tuned settings are worth, as text."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from autotune.core.evidence import BaselineEvidence, RecipeRow
from autotune.core.units import format_count, format_seconds, format_share
from autotune.decide.statistics import SHOWN_CONFIDENCE
from autotune.show.intervals import with_bounds
from autotune.show.tables import text_table

HEADERS = ("settings", "real tokens/s (median)", "of the tuned", "95 % interval", "data wait", "windows", "outcome")
ALIGN = "lrrrrrl"


def baseline_text(found: BaselineEvidence, profile: Path) -> str:
    """The answer for people, and what to run next."""
    return "\n".join(
        [
            text_table(HEADERS, [baseline_cells(row) for row in found.rows], align=ALIGN),
            *baseline_lines(found),
            "",
            *gains(found),
            f"profile: {profile}",
            f"next: autotune report build {profile}",
        ]
    )


def baseline_cells(row: RecipeRow) -> list[str | None]:
    """One row of the comparison's table."""
    bounds = f"{row.ratio_low:.3f} to {row.ratio_high:.3f}" if row.ratio_low and row.ratio_high else None
    rates = row.real_tokens_per_s
    return [
        row.name,
        format_count(statistics.median(rates)) if rates else None,
        None if row.ratio_to_tuned is None else f"{row.ratio_to_tuned:.3f}",
        "1" if row.name == "tuned" else bounds,
        format_share(row.data_wait_share),
        str(len(rates)),
        row.outcome,
    ]


def baseline_lines(found: BaselineEvidence) -> Iterator[str]:
    """What belongs under the table, a line each."""
    ranks = "1 rank" if found.local_ranks == 1 else f"{found.local_ranks} ranks together"
    yield (
        f"{ranks}, {found.windows} windows of at least {format_seconds(found.window_s)}; padding does not count; the "
        "same model, data, length of rows and global batch"
    )
    for row in found.rows:
        if row.name == "tuned":
            continue
        yield f"{row.name}{':' if row.differences else ': nothing differs from the tuned settings'}"
        yield from (f"  {one}" for one in row.differences)


def gains(found: BaselineEvidence) -> Iterator[str]:
    """How many times as fast the tuned settings are, a line for each of the others."""
    for row in found.rows:
        if row.name == "tuned":
            continue
        if row.ratio_to_tuned is None:
            yield f"tuned, against {row.name}: n/a ({row.outcome})"
            continue
        low, high = (None if end is None else 1 / end for end in (row.ratio_high, row.ratio_low))
        ratio = with_bounds(1 / row.ratio_to_tuned, low, high, "{:.2f}".format, SHOWN_CONFIDENCE)
        yield f"tuned, against {row.name}: {ratio} times the real tokens per second"
