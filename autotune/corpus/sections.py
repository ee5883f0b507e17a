"""Text and report blocks of a dataset.

They show its counts, its sample lengths, and padding at the profile's sequence length.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
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
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import format_bytes, format_count, format_share
from autotune.base.wording import format_number, plural
from autotune.corpus.values import (
    SPECIAL_TOKENS_PER_SAMPLE,
    Inspected,
    LengthDistribution,
)

if TYPE_CHECKING:  # commands whose help must not load pydantic draw lengths too
    from pathlib import Path

    from autotune.report.values import ReportedProfile, ReportedRun
    from trainer.formats.manifest import Manifest, SourceStatistics

BAR_WIDTH = 40
_PERCENTILES = (10, 50, 75, 90, 99)
_HELD_OUT_SAMPLES = 20
"""Validation samples that a suggested share holds out on average; by chance there are
none in one of 5e8 datasets."""


def counts_of(directory: "Path", manifest: "Manifest") -> dict[str, object]:
    """Return the fields with which every JSON answer about a dataset begins."""
    return {
        "path": directory,
        "dataset_hash": manifest.dataset_hash,
        "samples": manifest.train.samples,
        "tokens": manifest.train.tokens,
        "validation_samples": manifest.validation.samples,
        "validation_tokens": manifest.validation.tokens,
    }


def preparation_warnings(manifest: "Manifest", validation_share: float) -> list[str]:
    """Return what is likely wrong with a prepared dataset, a sentence each.

    Args:
        manifest: Its manifest.
        validation_share: Share of samples that was to be held out.
    """
    from trainer.config.train_config import TrainConfig
    from trainer.formats.manifest import MAX_CUT_TOKENS_SHARE

    warnings = []
    samples = manifest.train.samples
    if validation_share and not manifest.validation.samples:
        larger_share = min(0.5, math.ceil(100 * _HELD_OUT_SAMPLES / samples) / 100)
        warnings.append(
            f"no validation samples: of {plural(samples, 'sample')},"
            f" {format_share(validation_share)} were to be held out, and chance held"
            f" out none; add --validation-share {larger_share} --overwrite, or make"
            " more and shorter samples"
        )
    seq_length_tokens = TrainConfig.model_fields["seq_length_tokens"].default
    limit_tokens = seq_length_tokens - SPECIAL_TOKENS_PER_SAMPLE
    cut_share = manifest.train.cut_tokens_share(limit_tokens)
    if cut_share is not None and cut_share > MAX_CUT_TOKENS_SHARE:
        warnings.append(
            f"training would cut off {format_share(cut_share)} of the tokens at its"
            f" default sequence length of {seq_length_tokens}; add --max-tokens"
            f" {limit_tokens} --long split --overwrite, or tune with a larger"
            " --seq-length"
        )
    return warnings


def dataset_text(found: Inspected) -> str:
    """Render counts, lengths, and the effect of sequence lengths on the samples."""
    lengths = "  ".join(
        f"p{name} {format_count(value)}" for name, value in found.percentiles.items()
    )
    every = _every_fact(
        found.manifest, f"{lengths}  longest {format_count(found.longest_tokens)}"
    )
    rows = table_of(
        "",
        found.rows,
        ("seq length", "l", lambda row: format_count(row.seq_length_tokens)),
        ("padding", "l", lambda row: format_share(row.padded_waste)),
        ("samples cut", "l", lambda row: format_share(row.cut_samples)),
        ("tokens lost", "l", lambda row: format_share(row.cut_tokens)),
        (
            "packed sequences full",
            "l",
            lambda row: f"{row.packed_efficiency * 100:.2f} %",
        ),
        ("packing gain", "l", lambda row: f"{row.packing_gain:.2f} x"),
    )
    text = facts_text(every, "tokens per sample of the training split", found.manifest)
    sampled = (
        f"measured on {format_count(found.sampled)} random samples; special tokens"
        " included"
    )
    return f"{text}\n\n{console_text((rows,))}\n{sampled}"


def facts_text(told: Mapping[str, str | None], title: str, manifest: "Manifest") -> str:
    """Render facts, and below a title the sample lengths of the training split."""
    histogram = manifest.train.length_histogram
    drawn = length_histogram(histogram.edges, histogram.counts)
    return "\n".join(
        [console_text((facts_table("", list(told.items())),)), "", title, drawn]
    )


def uncompressed_bytes(source: "SourceStatistics") -> int:
    """Return the size of the input that the size of the tokens is compared with.

    It is that of the files, or of their text where compression makes the files smaller.
    Text of executables is written for the tokenizer, and is no size of the input.
    """
    if source.text_bytes is None or "elf" in source.kinds:
        return source.raw_bytes
    return max(source.raw_bytes, source.text_bytes)


def facts_of(manifest: "Manifest") -> dict[str, str]:
    """Return the sources, vocabulary and long samples of a dataset, in words."""
    source = manifest.source
    raw = format_bytes(source.raw_bytes)
    compared_bytes = uncompressed_bytes(source)
    if compared_bytes > source.raw_bytes:
        raw += f" ({format_bytes(compared_bytes)} uncompressed)"
    change = ""
    if compared_bytes:
        change = f" ({100 * (source.token_bytes / compared_bytes - 1):+.1f} %)"
    return {
        "raw -> tokens": (
            f"{raw} -> {format_bytes(source.token_bytes)}{change},"
            f" {', '.join(source.kinds)}, {plural(source.files, 'file')}"
        ),
        "vocabulary": (
            f"{format_count(manifest.vocab_size)} ids,"
            f" {format_count(manifest.used_vocab_size)} in use, stored as"
            f" {manifest.dtype}"
        ),
        "long samples": (
            f"{format_count(source.truncated_samples)} cut,"
            f" {format_count(source.split_samples)} split"
        ),
    }


def _every_fact(manifest: "Manifest", lengths: str | None) -> dict[str, str | None]:
    """Return the facts of a dataset; lengths are None if they are not known."""
    source, train, validation = manifest.source, manifest.train, manifest.validation
    return {
        "dataset": manifest.dataset_hash[:16],
        "train": (
            f"{format_count(train.samples)} samples, {format_count(train.tokens)}"
            f" tokens, {plural(len(train.shards), 'shard')}"
        ),
        "validation": (
            f"{format_count(validation.samples)} samples,"
            f" {format_count(validation.tokens)} tokens"
        ),
        **facts_of(manifest),
        "left out": (
            f"{format_count(source.rejected)} unusable,"
            f" {format_count(source.duplicate_samples)} duplicates,"
            f" {format_count(source.empty_samples)} empty"
        ),
        "tokens per sample": lengths,
    }


def length_histogram(edges: Sequence[int], counts: Sequence[int]) -> str:
    """Draw the samples by length in tokens, one bar per doubling.

    ``edges`` ascend, and the last bin is open-ended.
    """
    total = sum(counts)
    if total == 0:
        return ""
    rows = [
        (_label(first, end), held) for first, end, held in _doublings(edges, counts)
    ]
    tallest, width = max(held for _, held in rows), max(len(label) for label, _ in rows)
    lines = []
    for label, held in rows:
        bar = "#" * max(round(BAR_WIDTH * held / tallest), 1 if held else 0)
        lines.append(
            f"{label:>{width}}  {bar:<{BAR_WIDTH}}  {format_count(held):>9} "
            f" {format_share(held / total):>7}"
        )
    return "\n".join(lines)


def _doublings(
    edges: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, int | None, int]]:
    """Join bins into (first, end or None, samples), one per power of two.

    Empty ones at either end are left out.
    """
    bins = zip(edges, [*edges[1:], None], counts, strict=True)
    groups = [
        list(group)
        for _, group in itertools.groupby(bins, key=lambda bin_: bin_[0].bit_length())
    ]
    rows = [
        (group[0][0], group[-1][1], sum(count for _, _, count in group))
        for group in groups
    ]
    filled = [index for index, (_, _, count) in enumerate(rows) if count]
    return rows[filled[0] : filled[-1] + 1]


def _label(first: int, end: int | None) -> str:
    return (
        f"{format_count(first)} or more"
        if end is None
        else f"{format_count(first)} to {format_count(end - 1)}"
    )


def lengths_section(
    profiles: "tuple[ReportedProfile, ...]", runs: "tuple[ReportedRun, ...]"
) -> dict[str, tuple[Block, ...]]:
    """Return the sample lengths of datasets, and how full sequences are, by profile.

    Each dataset and sequence length is shown once.
    """
    told: dict[tuple[str, int], str] = {}

    def blocks(one: "ReportedProfile") -> tuple[Block, ...]:
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
                f" {_label(spread.edges[-1], None)} tokens: no chart."
            )
            return (Paragraph(words=(reason,)), table)
        return (_chart(one, spread), table)

    return {one.title: (*blocks(one), *_packing(one, runs)) for one in profiles}


def _chart(one: "ReportedProfile", spread: LengthDistribution) -> Chart:
    seq_length_tokens = one.profile.train.seq_length_tokens
    bins = _doublings(spread.edges, spread.counts)
    drawn = [(first, end, samples) for first, end, samples in bins if end is not None]
    samples = spread.samples
    most = [
        f"{percentile} % have at most"
        f" {format_number(round(spread.percentile_tokens(percentile / 100) or 0))}"
        for percentile in _PERCENTILES
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
            ("tokens", "r", lambda one: _label(one[0], one[1])),
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
        return facts_table("The dataset", [*_every_fact(manifest, None).items()])
    lengths = "  ".join(
        f"p{p} {format_number(round(spread.percentile_tokens(p / 100) or 0))}"
        for p in _PERCENTILES
    )
    rows: list[Row] = [
        *_every_fact(manifest, lengths).items(),
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
