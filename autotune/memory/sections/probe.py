"""Text of the answer of ``autotune probe``."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.document import table_of
from autotune.base.render_console import console_text
from autotune.base.units import format_bytes, format_count, format_seconds
from autotune.base.wording import format_number
from autotune.memory.sections.memory_breakdown import contents_blocks
from autotune.memory.sections.size_reasons import rate_unit, reasons_of
from autotune.profiles.decide.follow_up import workers_command
from autotune.profiles.store import WrittenProfile


def probe_text(probed: Sequence[WrittenProfile]) -> str:
    """Return the text about probed subjects, all with the same searched argument.

    It begins with a table, which has a line for each subject. Then come the reasons for
    each size, the paths of profiles, the commands to run next, and what memory consists
    of, if it was recorded.
    """
    first = probed[0].profile
    size = first.subject.size
    table = table_of(
        "",
        probed,
        ("subject", "l", lambda written: written.profile.subject.words),
        ("parameters", "r", lambda written: _millions(written.probe.parameters)),
        (f"max {size}", "r", _largest),
        (
            "out of memory at",
            "r",
            lambda written: format_count(written.probe.infeasible_min),
        ),
        (size, "r", lambda written: str(written.profile.size)),
        (rate_unit(first), "r", _expected_rate),
        (
            "peak memory",
            "r",
            lambda written: format_bytes(written.probe.feasible_peak_bytes),
        ),
        ("predicted", "r", _predicted_peak),
        ("trials", "r", lambda written: str(written.probe.search_trials)),
        ("time", "r", lambda written: format_seconds(written.probe.seconds)),
    )
    reasons: list[tuple[str, doc.Words]] = []
    paths: list[tuple[str, doc.Words]] = []
    next_commands: list[tuple[str, doc.Words]] = []
    for written in probed:
        name = written.profile.subject.words
        reasons += [(name, (reason,)) for reason in reasons_of(written.profile)]
        previous = ""
        if written.previous:
            previous = f" (previous one: {written.previous})"
        paths.append(("profile", (f"{written.path}{previous}",)))
        following = workers_command(written.profile, written.path)
        next_commands.append(("next", (following,)))
    blocks: list[doc.Block] = [
        table,
        doc.Pairs(pairs=(*reasons, *paths, *next_commands)),
    ]
    for written in probed:
        blocks += contents_blocks(written.profile)
    return console_text(tuple(blocks))


def _millions(parameters: int | None) -> str | None:
    return f"{parameters / 1e6:.1f} M" if parameters else None


def _largest(written: WrittenProfile) -> str:
    """Return the largest size that ran, marked if more may fit."""
    sign = "≥ " if written.probe.is_lower_bound else ""
    return f"{sign}{written.probe.feasible_max}"


def _expected_rate(written: WrittenProfile) -> str | None:
    """Return the throughput to expect of the chosen size."""
    size = written.profile.size
    expected = (
        written.probe.expected_throughput(size) if isinstance(size, int) else None
    )
    return None if expected is None else format_number(expected.units_per_s)


def _predicted_peak(written: WrittenProfile) -> str | None:
    """Return the peak memory that the trace predicted, or else smaller trials."""
    probe = written.probe
    return format_bytes(probe.traced_peak_bytes or probe.predicted_peak_bytes)
