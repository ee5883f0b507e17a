"""Sections of the report about datasets: sample lengths, padding and packing.

Begin with ``lengths_section``.
"""

from typing import TYPE_CHECKING

from autotune.base.document import (
    Axis,
    Block,
    Chart,
    Histogram,
    HistogramBin,
    Missing,
    ReferenceLine,
    Table,
    facts_table,
    paragraph,
    table_of,
)
from autotune.base.tables import Row
from autotune.base.units import format_count, format_share
from autotune.base.wording import format_number, plural
from autotune.corpus.sections import (
    SHOWN_PERCENTILES,
    bin_label,
    dataset_facts,
    doublings,
)
from autotune.corpus.values import (
    SPECIAL_TOKENS_PER_SAMPLE,
    LengthDistribution,
)

if TYPE_CHECKING:  # commands whose help must not load pydantic draw lengths too
    from autotune.profiles.reported_profile import ReportedProfile
    from autotune.report.values import ReportedRun
    from trainer.formats.manifest import Manifest


def lengths_section(
    profiles: "tuple[ReportedProfile, ...]", runs: "tuple[ReportedRun, ...]"
) -> dict[str, tuple[Block, ...]]:
    """Return the sample lengths of datasets, and how full sequences are, by profile.

    Each dataset and sequence length is shown once.
    """
    blocks_by_profile: dict[str, tuple[Block, ...]] = {}
    first_titles: dict[tuple[str, int], str] = {}
    for reported in profiles:
        packing = _packing(reported, runs)
        if not reported.profile.has_train:
            lengths: tuple[Block, ...] = ()  # code of yours reads its own data
        elif reported.dataset is None:
            lengths = (
                Missing(
                    subject=f"Sample lengths ({reported.dataset_lacking})",
                    commands=(f"autotune report {reported.quoted} --data DIR",),
                ),
            )
        else:
            seq_length_tokens = reported.profile.train.seq_length_tokens
            first = first_titles.setdefault(
                (reported.dataset.dataset_hash, seq_length_tokens), reported.title
            )
            if first == reported.title:
                lengths = _lengths(reported.dataset, seq_length_tokens)
            else:
                lengths = (paragraph(f"Same dataset and sequence length as {first}."),)
        blocks_by_profile[reported.title] = (*lengths, *packing)
    return blocks_by_profile


def _lengths(manifest: "Manifest", seq_length_tokens: int) -> tuple[Block, ...]:
    """Return the chart of sample lengths, or why there is none, and the facts."""
    lengths = LengthDistribution(**manifest.train.length_histogram.model_dump())
    if not lengths.samples:
        return (paragraph("The dataset's training split is empty."),)
    table = _dataset(manifest, lengths, seq_length_tokens)
    if lengths.unknown:
        reason = "The dataset's manifest has no sample lengths to draw."
        return (paragraph(reason), table)
    if lengths.samples == lengths.counts[-1]:
        # The last bin has no end, so it has no bar.
        reason = (
            f"All {plural(lengths.samples, 'sample')} have"
            f" {bin_label(lengths.edges[-1], None)} tokens: no chart."
        )
        return (paragraph(reason), table)
    return (_chart(lengths, seq_length_tokens), table)


def _chart(lengths: LengthDistribution, seq_length_tokens: int) -> Chart:
    bins = doublings(lengths.edges, lengths.counts)
    samples = lengths.samples
    drawn = [(start, end, count) for start, end, count in bins if end is not None]
    beyond = sum(count for _, end, count in bins if end is None)
    percentiles = [
        f"{percentile} % have at most {_percentile_tokens(lengths, percentile)}"
        for percentile in SHOWN_PERCENTILES
    ]
    max_sample_tokens = seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    truncated_share = lengths.truncated_share(max_sample_tokens)
    return Chart(
        title="Sample lengths",
        description=(
            f"Tokens of {plural(samples, 'sample')}: {', '.join(percentiles)}."
            f" {format_share(truncated_share)} exceed the {max_sample_tokens} tokens"
            " that fit in a sequence without its special tokens;"
            f" {format_share(beyond / samples)} are beyond the right edge. The width of"
            " bars doubles."
        ),
        drawing=Histogram(
            x=Axis(
                label="tokens of a sample",
                unit="count",
                log=2,
                ticks=tuple(float(end) for _, end, _ in drawn),
            ),
            y=Axis(label="share of samples", unit="share"),
            # A logarithmic axis has no 0, so the first bin is as wide as the others.
            bins=tuple(
                HistogramBin(
                    start=max(start, end / 2), end=float(end), height=count / samples
                )
                for start, end, count in drawn
            ),
            reference_lines=(
                ReferenceLine(value=float(max_sample_tokens), label="sequence length"),
            ),
        ),
        table=table_of(
            "Samples by length (training split, special tokens not counted)",
            bins,
            ("tokens", "r", lambda row: bin_label(row[0], row[1])),
            ("samples", "r", lambda row: format_count(row[2])),
            ("share", "r", lambda row: format_share(row[2] / samples)),
            long=True,
        ),
    )


def _dataset(
    manifest: "Manifest", lengths: LengthDistribution, seq_length_tokens: int
) -> Table:
    """Return the facts about a dataset; those on lengths only if they are known."""
    if lengths.unknown:
        return facts_table("The dataset", [*dataset_facts(manifest, None).items()])
    percentiles = "  ".join(
        f"p{percentile} {_percentile_tokens(lengths, percentile)}"
        for percentile in SHOWN_PERCENTILES
    )
    truncated_share = lengths.truncated_share(
        seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    )
    rows: list[Row] = [
        *dataset_facts(manifest, percentiles).items(),
        ["mean tokens per sample", format_number(lengths.mean_tokens() or 0.0)],
        ["truncated samples", format_share(truncated_share)],
        [
            f"padding, one sample per sequence of {seq_length_tokens}",
            format_share(lengths.padding_waste(seq_length_tokens)),
        ],
    ]
    return facts_table("The dataset", rows)


def _percentile_tokens(lengths: LengthDistribution, percentile: int) -> str:
    tokens = lengths.percentile_tokens(percentile / 100) or 0
    return format_number(round(tokens))


def _packing(
    reported: "ReportedProfile", runs: "tuple[ReportedRun, ...]"
) -> tuple[Block, ...]:
    """Return the share of non-padding tokens in a profile's layout and in its runs."""
    from autotune.evidence.profile import fill_share

    rows: list[Row] = []
    expected_share = fill_share(reported.profile)
    if expected_share is not None:
        layout = reported.profile.train.layout
        rows.append(
            [f"{layout} sequences of this dataset", format_share(expected_share)]
        )
    for run in runs:
        steps = run.run.steps
        if run.profile_path != reported.path or not steps:
            continue
        non_padding_tokens = sum(step.non_padding_tokens for step in steps)
        padded_tokens = sum(step.padded_tokens for step in steps)
        share = non_padding_tokens / max(1, padded_tokens)
        rows.append([f"steps of {run.name}", format_share(share)])
    if not rows:
        return ()
    table = table_of(
        "Packing efficiency",
        rows,
        ("sequences", "l", lambda row: row[0]),
        ("non-padding share", "r", lambda row: row[1]),
    )
    return (table,)
