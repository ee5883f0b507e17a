"""A dataset as text."""

from autotune.core.dataset import Inspected
from autotune.core.units import format_bytes, format_count, format_share
from autotune.show.histogram import length_histogram
from autotune.show.tables import text_table


def dataset_text(found: Inspected) -> str:
    """Counts, lengths, and what row lengths do to the samples."""
    manifest = found.manifest
    source, train, validation = manifest.source, manifest.train, manifest.validation
    change = source.token_bytes / source.raw_bytes - 1 if source.raw_bytes else 0.0
    size = f"{format_bytes(source.raw_bytes)} -> {format_bytes(source.token_bytes)}"
    percentiles = "  ".join(f"p{name} {format_count(value)}" for name, value in found.percentiles.items())
    lines = {
        "dataset": manifest.dataset_hash[:16],
        "train": f"{format_count(train.samples)} samples, {format_count(train.tokens)} tokens, "
        f"{len(train.shards)} shards",
        "validation": f"{format_count(validation.samples)} samples, {format_count(validation.tokens)} tokens",
        "vocabulary": f"{format_count(manifest.vocab_size)} ids, {format_count(manifest.used_vocab_size)} in use, "
        f"stored as {manifest.dtype}",
        "raw -> tokens": f"{size} ({'+' if change > 0 else '-'}{format_share(abs(change))}), "
        f"{', '.join(source.kinds)}, {format_count(source.files)} files",
        "left out": f"{format_count(source.rejected)} unusable, {format_count(source.duplicate_samples)} "
        f"duplicates, {format_count(source.empty_samples)} empty",
        "long samples": f"{format_count(source.truncated_samples)} cut, {format_count(source.split_samples)} split",
        "tokens per sample": f"{percentiles}  longest {format_count(found.longest_tokens)}",
    }
    width = max(map(len, lines))
    histogram = train.length_histogram
    return "\n".join(
        [
            *(f"{name:<{width}}  {value}" for name, value in lines.items()),
            "",
            "tokens per sample of the training split",
            length_histogram(histogram.edges, histogram.counts),
            "",
            _rows_table(found),
            f"measured on {format_count(found.sampled)} samples drawn at random; special tokens included",
        ]
    )


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
