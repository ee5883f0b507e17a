"""What the tuned settings are worth, as text."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from autotune.core.evidence import BaselineEvidence, RecipeRow
from autotune.core.units import format_count, format_seconds, format_share
from autotune.show.intervals import of_windows, window_bounds
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
    ratio = None if row.tuned_ratio is None else row.tuned_ratio.inverse
    rates = row.real_tokens_per_s
    return [
        row.name,
        format_count(statistics.median(rates)) if rates else None,
        None if ratio is None else f"{ratio.value:.3f}",
        "1" if row.name == "tuned" else None if ratio is None else window_bounds(ratio, "{:.3f}".format),
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
        if row.tuned_ratio is None:
            yield f"tuned, against {row.name}: n/a ({row.outcome})"
            continue
        ratio = of_windows(row.tuned_ratio, "{:.2f}".format)
        yield f"tuned, against {row.name}: {ratio} times the real tokens per second"
