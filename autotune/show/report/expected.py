"""What was expected of runs, and what they reached."""

from collections.abc import Callable, Sequence

from autotune.core.interval import SHOWN_CONFIDENCE, Interval
from autotune.core.units import format_bytes, format_share
from autotune.decide.drift import Drift
from autotune.show.intervals import bounds, confidence_words
from autotune.show.report.document import LONG_TABLE_ROWS, Block, Paragraph, Table
from autotune.show.report.figures import count
from autotune.show.report.seen import SeenRun


def expected(every: Sequence[SeenRun]) -> tuple[Block, ...]:
    """The loop closed: what was expected of each run, and what it reached."""
    found = [(one.reported.name, drift) for one in every for drift in one.drifts]
    if not found:
        return (Paragraph(words=("No run has its profile in this report, so nothing was expected of them.",)),)
    table = Table(
        caption="Expected and achieved",
        headers=(
            "run",
            "what",
            "verdict",
            "achieved over expected, 95 %",
            "achieved, 95 %",
            "expected, 95 % unless told",
            "expected by",
        ),
        rows=tuple([name, *_drift_cells(drift)] for name, drift in found),
        align="lllrrrl",
        long=len(found) > LONG_TABLE_ROWS,
    )
    return (table,)


def _drift_cells(drift: Drift) -> list[str | None]:
    forms: dict[str, Callable[[float], str]] = {
        "real tokens/s": count,
        "MFU": format_share,
        "peak memory": format_bytes,
    }
    form = forms[drift.quantity]
    return [
        drift.quantity,
        drift.verdict,
        _bounded(drift.ratio, "{:.3f}".format),
        _bounded(drift.achieved, form),
        _bounded(drift.expected, form),
        drift.expected_source,
    ]


def _bounded(known: Interval | None, form: Callable[[float], str]) -> str | None:
    """With the confidence, unless it is the one of the headings."""
    if known is None:
        return None
    between = bounds(known.low, known.high, form)
    if between is None:
        return form(known.value)
    told = "" if known.confidence == SHOWN_CONFIDENCE else f", {confidence_words(known.confidence)}"
    return f"{form(known.value)} ({between}{told})"
