"""What a worker sweep found, as text."""

import statistics
from pathlib import Path

from autotune.core.profile import WorkersEvidence, WorkersRow
from autotune.core.units import format_count, format_share
from autotune.show.tables import text_table

HEADERS = ("loader workers", "slot tokens/s (median)", "of the best", "95 % interval", "data wait", "GPU utilisation")
ALIGN = "rrrrrr"


def workers_text(found: WorkersEvidence, profile: Path, data: Path) -> str:
    """The answer for people, and what to run next."""
    ceiling = statistics.median(found.ceiling_slot_tokens_per_s)
    return "\n".join(
        [
            text_table(HEADERS, [workers_cells(row) for row in found.rows], align=ALIGN),
            f"ceiling on cached batches: {format_count(ceiling)} slot tokens/s",
            f"GPU utilisation: {found.gpu_utilisation_source}",
            "",
            f"loader workers: {found.chosen} ({found.choice})",
            f"profile: {profile}",
            f"next: torchrun --nproc-per-node 2 -m trainer --profile {profile} --data {data}",
        ]
    )


def workers_cells(row: WorkersRow) -> list[str | None]:
    """One row of the sweep's table."""
    bounds = f"{row.ratio_low:.3f} to {row.ratio_high:.3f}" if row.ratio_low and row.ratio_high else None
    return [
        str(row.loader_workers),
        format_count(statistics.median(row.slot_tokens_per_s)),
        f"{row.ratio_to_best:.3f}",
        bounds,
        format_share(row.data_wait_share),
        format_share(row.gpu_utilisation),
    ]
