"""Report section on memory: the largest micro-batch, and a chart of its memory."""

from collections.abc import Mapping

from autotune.base import document as doc
from autotune.base.document import facts_table, table_of
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count, format_seconds, format_share
from autotune.base.wording import plural
from autotune.evidence.probe import LOWER_BOUND, ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.memory.sections.terms import TermLine, term_lines
from autotune.memory.values import ACTIVATIONS
from autotune.profiles.decide.follow_up import probe_command
from autotune.profiles.reported_profile import ReportedProfile

_MAX_PARTS = 7
"""Most parts of a bar; more cannot be distinguished."""


def memory_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the section on memory: its facts, and a chart of the predicted terms."""
    profile = reported.profile
    probe = profile.evidence.probe
    if probe is None:
        return (
            doc.Missing(
                subject="Largest micro-batch",
                commands=(probe_command(profile, reported.path),),
            ),
        )
    table = facts_table("Largest micro-batch", _facts(profile, probe))
    if not probe.traced_terms_bytes:
        return (table,)
    budget_bytes = profile.memory_budget_bytes
    breakdown = _traced_breakdown(probe, budget_bytes, profile.fingerprint.bytes_known)
    return (table, breakdown)


def _facts(profile: Profile, probe: ProbeEvidence) -> list[Row]:
    """Return the rows of the table of facts: the name and the value of each."""
    constraints = profile.constraints
    train = profile.train
    verified = "largest micro-batch, verified"
    if probe.is_lower_bound:
        verified = f"largest micro-batch that ran: {LOWER_BOUND}"
    verified_size = (
        f"{probe.feasible_max} sequences of {train.seq_length_tokens} tokens"
    )
    infeasible = str(probe.infeasible_min) if probe.infeasible_min else "none tried"
    traced_peak: str | None = "not predicted"
    if probe.traced_peak_bytes is not None:
        traced_peak = format_bytes(probe.traced_peak_bytes)
    accumulates = "yes" if probe.gradient_accumulation_steps > 1 else "no"
    return [
        ["memory budget per rank", format_bytes(profile.memory_budget_bytes)],
        [verified, verified_size],
        ["smallest micro-batch out of memory", infeasible],
        [
            f"peak memory of the largest, {profile.fingerprint.bytes_known}",
            format_bytes(probe.feasible_peak_bytes),
        ],
        ["peak memory, predicted before any trial", traced_peak],
        [
            "peak memory, predicted with smaller trials",
            format_bytes(probe.predicted_peak_bytes),
        ],
        [
            "largest micro-batch, predicted before any trial",
            format_count(probe.traced_micro_batch_size),
        ],
        ["parameters", format_count(probe.parameters)],
        ["ranks training together", str(probe.local_ranks)],
        ["gradient accumulation", accumulates],
        ["layout", train.layout],
        [
            "non-padding tokens per sequence, average",
            f"{probe.mean_tokens_per_sequence:.1f}",
        ],
        ["trials until both sizes were verified", str(probe.search_trials)],
        ["time of all trials", format_seconds(probe.seconds)],
        ["headroom", format_share(constraints.headroom_share)],
        ["micro-batch size in use", f"{train.micro_batch_size}: {probe.choice}"],
    ]


def _traced_breakdown(
    probe: ProbeEvidence, budget_bytes: int, bytes_known: str
) -> doc.Chart:
    """Return the chart of predicted memory by term, beside the measured peak.

    Args:
        probe: Evidence with a memory breakdown.
        budget_bytes: Memory budget of each rank.
        bytes_known: How the peak is known, such as ``measured``.
    """
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
        title=f"Memory breakdown at {plural(probe.feasible_max, 'sequence')}",
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
