"""Tables on a sweep of a number of DataLoader workers."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.document import sentence
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_share
from autotune.base.wording import format_window_bounds
from autotune.evidence.workers import WorkersEvidence, WorkersRow


def count_head(title: str, chosen: str, evidence: WorkersEvidence) -> doc.Pairs:
    """Return the chosen count with its reason, and the next smaller one's result.

    Args:
        title: Name of the chosen settings.
        chosen: The chosen settings, in a few words.
        evidence: Evidence of the sweep.
    """
    reason = f" ({evidence.choice})"
    if evidence.next_smaller:
        reason += f". {sentence(evidence.next_smaller)}"
    return doc.Pairs(pairs=((title, (doc.Strong(text=chosen), reason)),))


def count_table(
    rows: Sequence[WorkersRow], rate_header: str, rates: Sequence[str]
) -> doc.Table:
    """Return the table of windows by number of workers, with a column of rates.

    Args:
        rows: Results by number of workers.
        rate_header: Header of the rates, with their unit.
        rates: Rate of each row, as text.
    """
    headers = (
        "num_workers",
        rate_header,
        "vs cached batches",
        "98 % CI",
        "data wait",
        "GPU utilisation",
        "RAM",
        "verdict",
    )
    cells = [_count_cells(row, rate) for row, rate in zip(rows, rates, strict=True)]
    return doc.Table(
        caption="Throughput by num_workers",
        headers=headers,
        rows=tuple(cells),
        align="r" * (len(headers) - 1) + "l",
    )


def _count_cells(row: WorkersRow, rate: str) -> Row:
    """Return the cells of a count, in the order of the headers of ``count_table``."""
    utilisation_share = row.gpu.utilisation_share if row.gpu else None
    return [
        str(row.num_workers),
        rate,
        format_share(row.ratio_to_cached),
        format_window_bounds(row.ratio, format_share),
        format_share(row.data_wait_share),
        format_share(utilisation_share),
        format_bytes(row.memory_bytes),
        row.verdict_words,
    ]
