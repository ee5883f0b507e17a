"""Report section on throughput by size, with the knee of the curve."""

from collections.abc import Sequence

from autotune.base import document as doc
from autotune.base.document import bulleted, table_of
from autotune.base.units import format_seconds, format_share
from autotune.base.wording import format_bounds, format_number
from autotune.evidence.probe import CurvePoint, ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.memory.sections.size_reasons import rate_unit, reasons_of
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.reported_profile import ReportedProfile

_CURVE_COLOUR = 0
"""Colour of the measured curve, as an index into the palette: blue."""
_USED_COLOUR = 5
"""Colour of the dot at the size in use: a red that stands out from the curve."""


def curve_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on throughput by size, and the size in use."""
    profile = reported.profile
    probe = profile.evidence.probe
    missing = doc.Missing(
        subject=f"Throughput by {profile.subject.size}",
        commands=(probe_command(profile, reported.path),),
    )
    if probe is None:
        return (missing,)
    used = bulleted(
        [f"{profile.subject.size} in use: {profile.size}", *reasons_of(profile)]
    )
    if not probe.curve:
        return (used, missing)
    return (_curve_chart(profile, probe), used)


def _curve_chart(profile: Profile, probe: ProbeEvidence) -> doc.Chart:
    """Return the chart of the throughput curve, with its knee and the size in use."""
    best = max(probe.curve, key=lambda point: point.units_per_s)
    smallest, largest = probe.curve[0], probe.curve[-1]
    return doc.Chart(
        title=f"Throughput by {profile.subject.size}",
        description=(
            f"{rate_unit(profile)}: {_rate_words(smallest)},"
            f" {_rate_words(largest)}; the highest is {_rate_words(best)}."
        ),
        drawing=_curve_drawing(profile, probe),
        table=_curve_table(profile, probe.curve, best),
    )


def _curve_drawing(profile: Profile, probe: ProbeEvidence) -> doc.LineChart:
    """Return the curve with its intervals, the size in use, and the knee's range."""
    subject = profile.subject
    points = tuple(
        doc.Point(
            x=point.size,
            y=point.units_per_s,
            low=point.units_per_s_low,
            high=point.units_per_s_high,
        )
        for point in probe.curve
    )
    lines = [
        doc.Line(name="measured, 95 % interval", points=points, colour=_CURVE_COLOUR)
    ]
    used_points = tuple(
        doc.Point(x=point.x, y=point.y) for point in points if point.x == profile.size
    )
    if used_points:
        lines.append(
            doc.Line(name="used", points=used_points, kind="dots", colour=_USED_COLOUR)
        )
    noun = "" if subject.noun is None else f" ({subject.noun}s)"
    return doc.LineChart(
        x=doc.Axis(
            label=f"{subject.size}{noun}",
            unit="count",
            log=2,
            ticks=tuple(point.x for point in points),
        ),
        y=doc.Axis(label=rate_unit(profile), unit="count", low=0),
        lines=tuple(lines),
        shade=_knee_shade(probe.knee_micro_batch_sizes),
    )


def _knee_shade(knee: Sequence[int]) -> doc.Shade | None:
    """Return the shade over the range in which the knee lies.

    Args:
        knee: Bounds of the knee's size; empty if it is unknown.

    Returns:
        None if the knee is unknown, or known exactly.
    """
    if not knee:
        return None
    low, high = min(knee), max(knee)
    if low == high:
        return None
    return doc.Shade(start=low, end=high, label="throughput levels off")


def _curve_table(
    profile: Profile, curve: Sequence[CurvePoint], best: CurvePoint
) -> doc.Table:
    """Return the table of the curve, with shares of the throughput of ``best``."""

    def interval(point: CurvePoint) -> str | None:
        rate = point.rate
        return format_bounds(rate.low, rate.high, format_number)

    def share_of_best(point: CurvePoint) -> str:
        return format_share(point.units_per_s / best.units_per_s)

    return table_of(
        f"Throughput by {profile.subject.size}",
        curve,
        (profile.subject.size, "r", lambda point: str(point.size)),
        (rate_unit(profile), "r", lambda point: format_number(point.units_per_s)),
        ("95 % interval", "r", interval),
        ("share of best", "r", share_of_best),
        ("step time (median)", "r", lambda point: format_seconds(point.step_s)),
        ("timed steps", "r", lambda point: str(point.timed_steps)),
    )


def _rate_words(point: CurvePoint) -> str:
    """Return the throughput of a point and its micro-batch size, in words."""
    return f"{format_number(point.units_per_s)} at {point.size}"
