"""Sections of the report about datasets: sample lengths, padding and packing."""

from typing import TYPE_CHECKING

from autotune.base.document import (
    Axis,
    Block,
    Chart,
    Histogram,
    HistogramBin,
    Missing,
    Paragraph,
    ReferenceLine,
    Table,
    facts_table,
    table_of,
)
from autotune.base.tables import Row
from autotune.base.units import format_count, format_share
from autotune.base.wording import format_number, plural
from autotune.corpus.values import (
    SPECIAL_TOKENS_PER_SAMPLE,
    LengthDistribution,
)

if TYPE_CHECKING:  # commands whose help must not load pydantic draw lengths too
    from autotune.profiles.reported_profile import ReportedProfile
    from autotune.report.values import ReportedRun
    from trainer.formats.manifest import Manifest
from autotune.corpus.sections import (
    SHOWN_PERCENTILES,
    bin_label,
    dataset_facts,
    doublings,
)


def lengths_section(
    profiles: "tuple[ReportedProfile, ...]", runs: "tuple[ReportedRun, ...]"
) -> dict[str, tuple[Block, ...]]:
    """Return the sample lengths of datasets, and how full sequences are, by profile.

    Each dataset and sequence length is shown once.
    """
    told: dict[tuple[str, int], str] = {}

    def blocks(one: "ReportedProfile") -> tuple[Block, ...]:
        if not one.profile.has_train:
            return ()  # code of yours reads its own data
        if one.dataset is None:
            command = f"autotune report {one.quoted} --data DIR"
            return (
                Missing(
                    subject=f"Sample lengths ({one.dataset_lacking})",
                    commands=(command,),
                ),
            )
        first = told.setdefault(
            (one.dataset.dataset_hash, one.profile.train.seq_length_tokens), one.title
        )
        if first != one.title:
            return (
                Paragraph(words=(f"Same dataset and sequence length as {first}.",)),
            )
        spread = LengthDistribution(**one.dataset.train.length_histogram.model_dump())
        if not spread.samples:
            return (Paragraph(words=("The dataset's training split is empty.",)),)
        table = _dataset(one, one.dataset, spread)
        if spread.unknown:
            reason = "The dataset's manifest has no sample lengths to draw."
            return (Paragraph(words=(reason,)), table)
        if spread.samples == spread.counts[-1]:
            # The last bin has no end, so it has no bar.
            reason = (
                f"All {plural(spread.samples, 'sample')} have"
                f" {bin_label(spread.edges[-1], None)} tokens: no chart."
            )
            return (Paragraph(words=(reason,)), table)
        return (_chart(one, spread), table)

    return {one.title: (*blocks(one), *_packing(one, runs)) for one in profiles}


def _chart(one: "ReportedProfile", spread: LengthDistribution) -> Chart:
    seq_length_tokens = one.profile.train.seq_length_tokens
    bins = doublings(spread.edges, spread.counts)
    drawn = [(first, end, samples) for first, end, samples in bins if end is not None]
    samples = spread.samples
    most = [
        f"{percentile} % have at most"
        f" {format_number(round(spread.percentile_tokens(percentile / 100) or 0))}"
        for percentile in SHOWN_PERCENTILES
    ]
    fits = seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    beyond = sum(n for _, end, n in bins if end is None)
    return Chart(
        title="Sample lengths",
        description=(
            f"Tokens of {plural(samples, 'sample')}: {', '.join(most)}."
            f" {format_share(spread.truncated_share(fits))} exceed the {fits} tokens"
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
                    start=max(first, end / 2), end=float(end), height=n / samples
                )
                for first, end, n in drawn
            ),
            reference_lines=(
                ReferenceLine(value=float(fits), label="sequence length"),
            ),
        ),
        table=table_of(
            "Samples by length (training split, special tokens not counted)",
            bins,
            ("tokens", "r", lambda one: bin_label(one[0], one[1])),
            ("samples", "r", lambda one: format_count(one[2])),
            ("share", "r", lambda one: format_share(one[2] / samples)),
            long=True,
        ),
    )


def _dataset(
    one: "ReportedProfile", manifest: "Manifest", spread: LengthDistribution
) -> Table:
    length = one.profile.train.seq_length_tokens
    if spread.unknown:
        return facts_table("The dataset", [*dataset_facts(manifest, None).items()])
    lengths = "  ".join(
        f"p{p} {format_number(round(spread.percentile_tokens(p / 100) or 0))}"
        for p in SHOWN_PERCENTILES
    )
    rows: list[Row] = [
        *dataset_facts(manifest, lengths).items(),
        ["mean tokens per sample", format_number(spread.mean_tokens() or 0.0)],
        [
            "truncated samples",
            format_share(spread.truncated_share(length - SPECIAL_TOKENS_PER_SAMPLE)),
        ],
        [
            f"padding, one sample per sequence of {length}",
            format_share(spread.padding_waste(length)),
        ],
    ]
    return facts_table("The dataset", rows)


def _packing(
    one: "ReportedProfile", runs: "tuple[ReportedRun, ...]"
) -> tuple[Block, ...]:
    """Return the share of non-padding tokens in a profile's layout and in its runs."""
    from autotune.evidence.profile import fill_share

    rows: list[Row] = []
    if (filled := fill_share(one.profile)) is not None:
        rows.append(
            [
                f"{one.profile.train.layout} sequences of this dataset",
                format_share(filled),
            ]
        )
    for run in runs:
        if steps := run.run.steps if run.profile_path == one.path else ():
            share = sum(step.non_padding_tokens for step in steps) / max(
                1, sum(step.padded_tokens for step in steps)
            )
            rows.append([f"steps of {run.name}", format_share(share)])
    columns = (
        ("sequences", "l", lambda row: row[0]),
        ("non-padding share", "r", lambda row: row[1]),
    )
    return (table_of("Packing efficiency", rows, *columns),) if rows else ()
