"""Text and report blocks about the largest size of a step of your own."""

from collections.abc import Iterator, Sequence

from autotune.base import document as doc
from autotune.base.document import bulleted, facts_table, table_of
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_seconds
from autotune.base.wording import format_bounds, format_number
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.machine.values import NOTHING_TIMED
from autotune.memory.sections.peak_contents import peak_contents_section
from autotune.profiles.decide.follow_up import probe_command, workers_command
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.store import WrittenProfile

_FASTER = 1.1
"""Advantage of half the largest size, or less, in the few timed steps of trials from
which it is mentioned."""


def own_probe_text(written: Sequence[WrittenProfile]) -> str:
    """Return the results of probes for people.

    Each has a line, with reasons, profiles and next commands.
    """
    known = [
        (one, step)
        for one in written
        if (step := one.profile.evidence.probe) is not None
    ]
    along = known[0][0].profile.subject.size
    table = table_of(
        "",
        known,
        ("step", "l", lambda one: one[0].profile.subject.words),
        (f"max {along}", "r", lambda one: str(one[1].feasible_max)),
        (
            "out of memory at",
            "r",
            lambda one: str(one[1].infeasible_min) if one[1].infeasible_min else None,
        ),
        (along, "r", lambda one: str(one[0].profile.settings[along])),
        ("peak memory", "r", lambda one: format_bytes(one[1].feasible_peak_bytes)),
        ("step time", "r", lambda one: _step_time(one[1])),
        ("trials", "r", lambda one: str(len(one[1].sizes))),
        ("time", "r", lambda one: format_seconds(one[1].seconds)),
    )
    reasons = [
        (one.profile.subject.words, (line,))
        for one, _ in known
        for line in step_lines(one.profile)
    ]
    paths = [("profile", (str(one.path),)) for one, _ in known]
    following = [
        ("next", (workers_command(one.profile, one.path),)) for one, _ in known
    ]
    blocks: list[doc.Block] = [
        table,
        doc.Pairs(pairs=(*reasons, *paths, *following)),
    ]
    for one, _ in known:
        blocks += contents_blocks(one.profile)
    return console_text(tuple(blocks))


def contents_blocks(profile: Profile) -> tuple[doc.Block, ...]:
    """Return the blocks on what memory consists of; none if it was not recorded."""
    probe, subject = profile.evidence.probe, profile.subject
    if probe is None:
        return ()
    blocks: list[doc.Block] = []
    if probe.contents is not None:
        size = subject.size_words(probe.feasible_max)
        blocks += peak_contents_section(probe.contents, size)
    if probe.refused_contents is not None and probe.infeasible_min is not None:
        size = subject.size_words(probe.infeasible_min)
        blocks += peak_contents_section(probe.refused_contents, size)
    return tuple(blocks)


def _step_time(found: ProbeEvidence) -> str | None:
    known = [
        row.step_s
        for row in found.sizes
        if row.size == found.feasible_max and row.step_s
    ]
    return format_seconds(known[-1]) if known else None


def step_lines(profile: Profile) -> Iterator[str]:
    """Yield a line each on the chosen size and on facts about your step."""
    found, along = profile.evidence.probe, profile.subject.size
    assert found is not None
    yield found.choice
    where = (
        "each in a fresh process"
        if found.verified_in == "fresh processes"
        else "in one process, twice"
    )
    above = found.infeasible_min or "no larger one"
    if found.is_lower_bound:
        yield f"time ended before the largest was verified: {found.feasible_max} ran"
    else:
        yield (
            f"verified: {found.feasible_max} ran, and {above} was out of memory,"
            f" {where}"
        )
    if found.infeasible_min is None and not found.is_lower_bound:
        yield (
            "more may fit: larger sizes were not tried (--max-micro-batch-size"
            f" {found.feasible_max})"
        )
    timed = {
        row.size: row.size / row.step_s
        for row in found.sizes
        if row.fits and row.step_s is not None
    }
    if timed and (rate := timed[max(timed)]):
        for size, faster in timed.items():
            if size <= max(timed) / 2 and faster > _FASTER * rate:
                yield (
                    f"larger need not be faster: {along} {size} computed"
                    f" {faster / rate:.2f} times as much per second"
                )
    if found.traced_micro_batch_size is not None:
        yield (
            f"a trace of build_model predicted {found.traced_micro_batch_size} before"
            " any trial"
        )
    if found.not_traced is not None:
        yield f"no prediction from build_model: {found.not_traced}"
    if found.contents_not_recorded is not None:
        yield f"contents of memory were not recorded: {found.contents_not_recorded}"
    if not found.optimizer_steps:
        yield "none of torch's optimizers took a step: steps were counted by calls"
    if found.varies_bytes:
        yield (
            f"steps of one size differ by {format_bytes(found.varies_bytes)}: a later"
            " step may need more memory"
        )
    if profile.fingerprint.bytes_known == "allocator":
        yield NOTHING_TIMED


def _rates_table(profile: Profile, found: ProbeEvidence) -> tuple[doc.Block, ...]:
    """Return the table of throughput by size, unless none was measured."""
    if not found.curve:
        return ()
    table = table_of(
        f"Throughput by {profile.subject.size}",
        found.curve,
        (profile.subject.size, "r", lambda point: str(point.size)),
        (
            f"{profile.subject.unit}/s",
            "r",
            lambda point: format_number(point.units_per_s),
        ),
        (
            "95 % interval",
            "r",
            lambda point: format_bounds(point.rate.low, point.rate.high, format_number),
        ),
        ("step", "r", lambda point: format_seconds(point.step_s)),
    )
    return (table,)


def step_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the report's blocks on the largest size: facts, chart and reasons."""
    profile = reported.profile
    found, subject = profile.evidence.probe, profile.subject
    if found is None:
        commands = (probe_command(profile, reported.path),)
        return (doc.Missing(subject="Largest size that fits", commands=commands),)
    budget, known = (
        profile.constraints.memory_budget_bytes,
        profile.fingerprint.bytes_known,
    )
    rows: list[Row] = [
        ["memory budget", format_bytes(budget)],
        [f"largest {subject.size}, verified", str(found.feasible_max)],
        [
            f"smallest {subject.size} out of memory",
            str(found.infeasible_min or "none tried"),
        ],
        [
            f"peak memory of the largest, {known}",
            format_bytes(found.feasible_peak_bytes),
        ],
        [
            "peak memory, predicted from smaller trials",
            format_bytes(found.predicted_peak_bytes),
        ],
        [
            f"largest {subject.size}, predicted by a trace",
            None
            if found.traced_micro_batch_size is None
            else str(found.traced_micro_batch_size),
        ],
        ["memory between steps", format_bytes(found.kept_bytes)],
        ["host memory", format_bytes(found.host_peak_bytes)],
        ["verified in", found.verified_in],
        ["time of all trials", format_seconds(found.seconds)],
    ]
    fitted = sorted(
        (row.size, row.peak_bytes) for row in found.sizes if row.fits and row.peak_bytes
    )
    facts = facts_table(f"Largest {subject.size}", rows)
    rates = _rates_table(profile, found)
    reasons = bulleted(step_lines(profile))
    if not fitted:
        return (facts, *rates, reasons)
    points = tuple(doc.Point(x=size, y=float(peak)) for size, peak in fitted)
    chart = doc.Chart(
        title=f"Memory by {subject.size}",
        description="; ".join(
            f"{format_bytes(peak)} at {size}" for size, peak in fitted
        )
        + ".",
        drawing=doc.LineChart(
            x=doc.Axis(label=subject.size, unit="count", low=0),
            y=doc.Axis(label="peak memory", unit="bytes", low=0),
            lines=(doc.Line(name=known, points=points, colour=0),),
            reference_lines=(
                ()
                if budget is None
                else (doc.ReferenceLine(value=float(budget), label="memory budget"),)
            ),
        ),
        table=table_of(
            "Trials in their order",
            found.sizes,
            (subject.size, "r", lambda row: str(row.size)),
            ("outcome", "l", lambda row: "fits" if row.fits else "out of memory"),
            ("peak memory", "r", lambda row: format_bytes(row.peak_bytes)),
            (
                "step time",
                "r",
                lambda row: None if row.step_s is None else format_seconds(row.step_s),
            ),
        ),
    )
    return (facts, chart, *rates, reasons, *contents_blocks(profile))
