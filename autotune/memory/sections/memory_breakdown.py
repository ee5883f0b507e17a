"""Report section on memory: the largest size, its growth, and its contents."""

from collections.abc import Iterator, Mapping

from autotune.base import document as doc
from autotune.base.document import facts_table, table_of
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.evidence.probe import LOWER_BOUND, ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.memory.sections.peak_contents import peak_contents_section
from autotune.memory.sections.terms import TermLine, term_lines
from autotune.memory.values import ACTIVATIONS
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.reported_profile import ReportedProfile

_MAX_PARTS = 7
"""Most parts of a bar; more cannot be distinguished."""


def memory_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on memory: its facts, and what it consists of.

    Without a trace, which predicts the terms, a chart shows how memory grows.
    """
    profile = reported.profile
    probe = profile.evidence.probe
    if probe is None:
        return (
            doc.Missing(
                subject=f"Largest {profile.subject.size}",
                commands=(probe_command(profile, reported.path),),
            ),
        )
    blocks: list[doc.Block] = [
        facts_table(f"Largest {profile.subject.size}", list(_facts(profile, probe)))
    ]
    if probe.traced_terms_bytes:
        blocks.append(_traced_breakdown(profile, probe))
    elif (growth := _growth_chart(profile, probe)) is not None:
        blocks.append(growth)
    return (*blocks, *contents_blocks(profile))


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


def _facts(profile: Profile, probe: ProbeEvidence) -> Iterator[Row]:
    """Yield the rows of the table of facts: the name and the value of each.

    A fact that the subject cannot have, such as tokens, has no row.
    """
    constraints, size = profile.constraints, profile.subject.size
    verified = f"largest {size}, verified"
    if probe.is_lower_bound:
        verified = f"largest {size} that ran: {LOWER_BOUND}"
    verified_size = profile.subject.size_words(probe.feasible_max)
    if profile.seq_length_tokens is not None:
        verified_size += f" of {profile.seq_length_tokens} tokens"
    infeasible = str(probe.infeasible_min) if probe.infeasible_min else "none tried"
    yield ["memory budget per rank", format_bytes(constraints.memory_budget_bytes)]
    yield [verified, verified_size]
    yield [f"smallest {size} out of memory", infeasible]
    peak = f"peak memory of the largest, {profile.fingerprint.bytes_known}"
    yield [peak, format_bytes(probe.feasible_peak_bytes)]
    if probe.not_traced is not None or probe.traced_peak_bytes is not None:
        traced_peak = "not predicted"
        if probe.traced_peak_bytes is not None:
            traced_peak = format_bytes(probe.traced_peak_bytes)
        yield ["peak memory, predicted before any trial", traced_peak]
        traced_size = format_count(probe.traced_micro_batch_size)
        yield [f"largest {size}, predicted before any trial", traced_size]
    predicted_peak = format_bytes(probe.predicted_peak_bytes)
    yield ["peak memory, predicted with smaller trials", predicted_peak]
    if probe.kept_bytes is not None:
        yield ["memory between steps", format_bytes(probe.kept_bytes)]
    if probe.host_peak_bytes:
        yield ["host memory", format_bytes(probe.host_peak_bytes)]
    if probe.parameters is not None:
        yield ["parameters", format_count(probe.parameters)]
    yield ["ranks training together", str(probe.local_ranks)]
    accumulates = "yes" if probe.gradient_accumulation_steps > 1 else "no"
    yield ["gradient accumulation", accumulates]
    if probe.mean_tokens_per_sequence is not None:
        mean_tokens = f"{probe.mean_tokens_per_sequence:.1f}"
        yield ["non-padding tokens per sequence, average", mean_tokens]
    yield ["verified in", probe.verified_in]
    yield ["trials until both sizes were verified", str(probe.search_trials)]
    yield ["time of all trials", format_seconds(probe.seconds)]
    yield ["headroom", format_share(constraints.headroom_share)]
    yield [f"{size} in use", f"{profile.size}: {probe.choice}"]


def _growth_chart(profile: Profile, probe: ProbeEvidence) -> doc.Chart | None:
    """Return the chart of memory by size; None if the trials were not recorded."""
    size = profile.subject.size
    fitted = sorted(
        (row.size, row.peak_bytes)
        for row in probe.sizes
        if row.fits and row.peak_bytes is not None
    )
    if not fitted:
        return None
    bytes_known = profile.fingerprint.bytes_known
    budget_bytes = profile.constraints.memory_budget_bytes
    budget_lines: tuple[doc.ReferenceLine, ...] = ()
    if budget_bytes is not None:
        budget_lines = (
            doc.ReferenceLine(value=float(budget_bytes), label="memory budget"),
        )
    by_size = "; ".join(f"{format_bytes(peak)} at {tried}" for tried, peak in fitted)
    points = tuple(doc.Point(x=tried, y=float(peak)) for tried, peak in fitted)
    return doc.Chart(
        title=f"Memory by {size}",
        description=f"{by_size}.",
        drawing=doc.LineChart(
            x=doc.Axis(label=size, unit="count", low=0),
            y=doc.Axis(label="peak memory", unit="bytes", low=0),
            lines=(doc.Line(name=bytes_known, points=points, colour=0),),
            reference_lines=budget_lines,
        ),
        table=table_of(
            "Trials in their order",
            probe.sizes,
            (size, "r", lambda row: str(row.size)),
            ("outcome", "l", lambda row: "fits" if row.fits else "out of memory"),
            ("peak memory", "r", lambda row: format_bytes(row.peak_bytes)),
            ("step time", "r", lambda row: format_seconds(row.step_s)),
        ),
    )


def _traced_breakdown(profile: Profile, probe: ProbeEvidence) -> doc.Chart:
    """Return the chart of predicted memory by term, beside the measured peak.

    Args:
        profile: Profile with a memory budget.
        probe: Evidence with a memory breakdown.
    """
    budget_bytes = profile.memory_budget_bytes
    bytes_known = profile.fingerprint.bytes_known
    terms = probe.traced_terms_bytes
    measured_bytes = probe.feasible_peak_bytes
    predicted_bytes = sum(terms.values())
    parts = _bar_parts(terms)
    lines = [
        *term_lines(terms),
        TermLine(name="all terms, predicted", size_bytes=predicted_bytes),
        TermLine(name=f"peak, {bytes_known}", size_bytes=measured_bytes),
        TermLine(name="memory budget per rank", size_bytes=budget_bytes),
    ]

    def share_of_predicted(line: TermLine) -> str | None:
        if not predicted_bytes:
            return None
        return format_share(line.size_bytes / predicted_bytes)

    by_term = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    measured = doc.Stack(
        label=bytes_known, parts=((f"peak, {bytes_known}", float(measured_bytes)),)
    )
    budget_line = doc.ReferenceLine(value=float(budget_bytes), label="memory budget")
    return doc.Chart(
        title=f"Memory breakdown at {profile.subject.size_words(probe.feasible_max)}",
        description=(
            f"Predicted {format_bytes(predicted_bytes)}: {by_term}."
            f" {bytes_known.capitalize()} {format_bytes(measured_bytes)}."
            f" Budget {format_bytes(budget_bytes)}."
        ),
        drawing=doc.StackedBarChart(
            axis=doc.Axis(label="memory per rank", unit="bytes"),
            stacks=(doc.Stack(label="predicted", parts=parts), measured),
            reference_lines=(budget_line,),
        ),
        table=table_of(
            "Memory by term",
            lines,
            ("term", "l", lambda line: line.name),
            ("size", "r", lambda line: line.size),
            ("share of predicted", "r", share_of_predicted),
        ),
    )


def _bar_parts(terms: Mapping[str, int]) -> tuple[tuple[str, float], ...]:
    """Return the parts of the bar of predicted memory, the largest first.

    The activations of all modules are one part. If there are too many parts, the
    smallest are added up as ``other``.
    """
    size_by_name: dict[str, float] = {}
    for term, size_bytes in terms.items():
        name = ACTIVATIONS if term.startswith(ACTIVATIONS) else term
        # A bar has no negative part.
        size_by_name[name] = size_by_name.get(name, 0.0) + max(0, size_bytes)
    largest_first = sorted(size_by_name.items(), key=lambda part: -part[1])
    if len(largest_first) <= _MAX_PARTS:
        return tuple(largest_first)
    shown = largest_first[: _MAX_PARTS - 1]
    others = largest_first[_MAX_PARTS - 1 :]
    return (*shown, ("other", sum(size for _, size in others)))
