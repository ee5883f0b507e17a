"""Text and report blocks of a dataset.

They show its counts, its sample lengths, and padding at the profile's sequence length.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.base.document import (
    facts_table,
    table_of,
)
from autotune.base.render_console import console_text
from autotune.base.units import format_bytes, format_count, format_share
from autotune.base.wording import plural
from autotune.corpus.values import (
    SPECIAL_TOKENS_PER_SAMPLE,
    Inspected,
)

if TYPE_CHECKING:  # commands whose help must not load pydantic draw lengths too
    from pathlib import Path

    from trainer.formats.manifest import Manifest, SourceStatistics

BAR_WIDTH = 40
"""Characters of the longest bar."""
SHOWN_PERCENTILES = (10, 50, 75, 90, 99)
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
    from trainer.formats.manifest import MAX_CUT_TOKENS_SHARE
    from trainer.formats.train_config import TrainConfig

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


def dataset_text(inspected: Inspected) -> str:
    """Render counts, lengths, and the effect of sequence lengths on the samples."""
    percentiles = "  ".join(
        f"p{percentile} {format_count(tokens)}"
        for percentile, tokens in inspected.percentiles.items()
    )
    longest = f"longest {format_count(inspected.longest_tokens)}"
    facts = dataset_facts(inspected.manifest, f"{percentiles}  {longest}")
    table = table_of(
        "",
        inspected.rows,
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
    title = "tokens per sample of the training split"
    text = facts_text(facts, title, inspected.manifest)
    note = (
        f"measured on {format_count(inspected.sampled)} random samples; special tokens"
        " included"
    )
    return f"{text}\n\n{console_text((table,))}\n{note}"


def facts_text(
    facts: Mapping[str, str | None], title: str, manifest: "Manifest"
) -> str:
    """Render facts, and below a title the sample lengths of the training split."""
    histogram = manifest.train.length_histogram
    bars = length_histogram(histogram.edges, histogram.counts)
    table = console_text((facts_table("", list(facts.items())),))
    return "\n".join([table, "", title, bars])


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


def dataset_facts(manifest: "Manifest", lengths: str | None) -> dict[str, str | None]:
    """Return the facts of a dataset; lengths are None if they are not known."""
    source = manifest.source
    train = manifest.train
    validation = manifest.validation
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
        (bin_label(first, end), samples)
        for first, end, samples in doublings(edges, counts)
    ]
    most_samples = max(samples for _, samples in rows)
    label_width = max(len(label) for label, _ in rows)
    lines = []
    for label, samples in rows:
        # Every bin with samples has a bar.
        least = 1 if samples else 0
        bar = "#" * max(round(BAR_WIDTH * samples / most_samples), least)
        lines.append(
            f"{label:>{label_width}}  {bar:<{BAR_WIDTH}}  {format_count(samples):>9} "
            f" {format_share(samples / total):>7}"
        )
    return "\n".join(lines)


def doublings(
    edges: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, int | None, int]]:
    """Join bins into (first, end or None, samples), one per power of two.

    Empty ones at either end are left out.
    """
    bins = zip(edges, [*edges[1:], None], counts, strict=True)
    rows: list[tuple[int, int | None, int]] = []
    # Lengths of one doubling have the same number of bits.
    for _, group in itertools.groupby(bins, key=lambda row: row[0].bit_length()):
        joined = list(group)
        first = joined[0][0]
        end = joined[-1][1]
        rows.append((first, end, sum(samples for _, _, samples in joined)))
    filled = [index for index, (_, _, samples) in enumerate(rows) if samples]
    return rows[filled[0] : filled[-1] + 1]


def bin_label(first: int, end: int | None) -> str:
    """Return the lengths of a bin in words, without ``end``; None for no end."""
    if end is None:
        return f"{format_count(first)} or more"
    return f"{format_count(first)} to {format_count(end - 1)}"
