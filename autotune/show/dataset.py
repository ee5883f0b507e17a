"""A dataset as text."""

from typing import TYPE_CHECKING

from autotune.core.dataset import Inspected
from autotune.core.units import format_bytes, format_count, format_share
from autotune.show.histogram import length_histogram
from autotune.show.tables import text_table

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.dataset import Manifest


def counts_of(directory: "Path", manifest: "Manifest") -> dict[str, object]:
    """Return what every JSON answer about a dataset begins with."""
    return {
        "path": directory,
        "dataset_hash": manifest.dataset_hash,
        "samples": manifest.train.samples,
        "tokens": manifest.train.tokens,
        "validation_samples": manifest.validation.samples,
        "validation_tokens": manifest.validation.tokens,
    }


def facts_of(manifest: "Manifest") -> dict[str, str]:
    """Return what a dataset was made of, and its vocabulary."""
    source = manifest.source
    change = source.token_bytes / source.raw_bytes - 1 if source.raw_bytes else 0.0
    size = f"{format_bytes(source.raw_bytes)} -> {format_bytes(source.token_bytes)}"
    return {
        "raw -> tokens": f"{size} ({'+' if change > 0 else '-'}{format_share(abs(change))}), "
        f"{', '.join(source.kinds)}, {format_count(source.files)} files",
        "vocabulary": f"{format_count(manifest.vocab_size)} ids, {format_count(manifest.used_vocab_size)} in use, "
        f"stored as {manifest.dtype}",
        "long samples": f"{format_count(source.truncated_samples)} cut, {format_count(source.split_samples)} split",
    }


def facts_text(facts: dict[str, str], title: str, manifest: "Manifest") -> str:
    """Render facts, and below a title how long the samples of the training split are."""
    width = max(map(len, facts))
    histogram = manifest.train.length_histogram
    drawn = length_histogram(histogram.edges, histogram.counts)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in facts.items()), "", title, drawn])


def dataset_text(found: Inspected) -> str:
    """Render counts, lengths, and what row lengths do to the samples."""
    manifest = found.manifest
    source, train, validation = manifest.source, manifest.train, manifest.validation
    percentiles = "  ".join(f"p{name} {format_count(value)}" for name, value in found.percentiles.items())
    facts = {
        "dataset": manifest.dataset_hash[:16],
        "train": f"{format_count(train.samples)} samples, {format_count(train.tokens)} tokens, "
        f"{len(train.shards)} shards",
        "validation": f"{format_count(validation.samples)} samples, {format_count(validation.tokens)} tokens",
        **facts_of(manifest),
        "left out": f"{format_count(source.rejected)} unusable, {format_count(source.duplicate_samples)} "
        f"duplicates, {format_count(source.empty_samples)} empty",
        "tokens per sample": f"{percentiles}  longest {format_count(found.longest_tokens)}",
    }
    text = facts_text(facts, "tokens per sample of the training split", manifest)
    sampled = f"measured on {format_count(found.sampled)} samples drawn at random; special tokens included"
    return f"{text}\n\n{_rows_table(found)}\n{sampled}"


def _rows_table(found: Inspected) -> str:
    rows = [
        [
            format_count(row.row_tokens),
            format_share(row.padded_waste),
            format_share(row.cut_samples),
            format_share(row.cut_tokens),
            f"{row.packed_efficiency * 100:.2f} %",
            f"{row.packing_gain:.2f} x",
        ]
        for row in found.rows
    ]
    head = ["row tokens", "padding", "samples cut", "tokens lost", "packed rows full", "packing gain"]
    return text_table(head, rows)
