"""How long samples are, and what rows of the profile's length make of them."""

import math
from collections.abc import Sequence

from autotune.core.dataset import SPECIAL_TOKENS_PER_SAMPLE, LengthDistribution
from autotune.core.units import format_bytes, format_count, format_share
from autotune.show.charts.drawing import Axis, Column, Columns, Rule
from autotune.show.report.document import Block, Chart, Missing, Paragraph, Table
from autotune.show.report.figures import count, plural
from autotune.show.report.inputs import ReportedProfile, ReportedRun
from trainer.dataset import Manifest

_BARS = 24
_PERCENTILES = (10, 50, 75, 90, 99)
_DRAWN_TO_SHARE = 0.95
"""The longest samples are few, and the table has them."""


def lengths(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """The dataset, the histogram of its lengths, and how full rows are."""
    if one.dataset is None:
        command = f"autotune report build {one.quoted} --data DIR"
        missing = Missing(what=f"Lengths of samples ({one.dataset_lacking})", commands=(command,))
        return (missing, *_packing(one, runs))
    manifest = one.dataset
    histogram = manifest.train.length_histogram
    spread = LengthDistribution(edges=histogram.edges, counts=histogram.counts)
    if not spread.samples:
        return (Paragraph(words=("The dataset's training split is empty.",)), *_packing(one, runs))
    return (_chart(one, spread), _dataset(one, manifest, spread), *_packing(one, runs))


def joined(edges: Sequence[int], counts: Sequence[int], width: int) -> list[tuple[int, int | None, int]]:
    """Bins joined to (first, end or None, samples) of at least so many tokens, cut after the last that is not empty."""
    ends: list[int | None] = [*edges[1:], None]
    found: list[tuple[int, int | None, int]] = []
    for first, end, samples in zip(edges, ends, counts, strict=True):
        open_bin = found[-1] if found else None
        if open_bin is not None and end is not None and first // width == open_bin[0] // width:
            found[-1] = (open_bin[0], end, open_bin[2] + samples)
        else:
            found.append((first, end, samples))
    while len(found) > 1 and not found[-1][2]:
        found.pop()
    return found


def _chart(one: ReportedProfile, spread: LengthDistribution) -> Chart:
    row_tokens = one.profile.train.seq_length_tokens
    reach = max(spread.percentile_tokens(_DRAWN_TO_SHARE) or 0.0, 1.5 * row_tokens)
    width = 2 ** max(0, math.ceil(math.log2(reach / _BARS)))
    bins = joined(spread.edges, spread.counts, width)
    drawn = [(first, end, samples) for first, end, samples in bins if end is not None and first < reach]
    samples = spread.samples
    columns = tuple(Column(start=first, end=end, value=n / samples) for first, end, n in drawn)
    rows = tuple(
        [f"{format_count(first)} or more" if end is None else f"{format_count(first)} to {format_count(end - 1)}",
         format_count(n), format_share(n / samples)]
        for first, end, n in bins
    )  # fmt: skip
    fits = row_tokens - SPECIAL_TOKENS_PER_SAMPLE
    beyond = sum(n for first, _, n in bins if first >= reach)
    return Chart(
        title="Lengths of samples",
        description=(
            f"{_percentiles(spread)}. {format_share(spread.truncated_share(fits))} are longer than the {fits} tokens "
            f"that a row holds beside special ones; {format_share(beyond / samples)} lie to the right of what is drawn."
        ),
        drawing=Columns(
            x=Axis(label="tokens of a sample", unit="count", low=0),
            y=Axis(label="share of samples", unit="share"),
            columns=columns,
            rules=(Rule(at=float(fits), label="what a row holds"),),
        ),
        table=Table(
            caption="Samples by length (training split, special tokens not counted)",
            headers=("tokens", "samples", "share"), rows=rows, align="rrr", long=True,
        ),
    )  # fmt: skip


def _percentiles(spread: LengthDistribution) -> str:
    parts = [f"{p} % have at most {count(round(spread.percentile_tokens(p / 100) or 0))}" for p in _PERCENTILES]
    return f"Tokens of {plural(spread.samples, 'sample')}: {', '.join(parts)}"


def _dataset(one: ReportedProfile, manifest: Manifest, spread: LengthDistribution) -> Table:
    row_tokens, source = one.profile.train.seq_length_tokens, manifest.source
    change = source.token_bytes / source.raw_bytes - 1 if source.raw_bytes else None
    percentiles = "  ".join(f"p{p} {count(round(spread.percentile_tokens(p / 100) or 0))}" for p in _PERCENTILES)
    rows: list[list[str | None]] = [
        ["samples to train on", format_count(manifest.train.samples)],
        ["tokens of them", format_count(manifest.train.tokens)],
        ["samples kept for validation", format_count(manifest.validation.samples)],
        ["vocabulary", f"{format_count(manifest.vocab_size)} ids, {format_count(manifest.used_vocab_size)} in use"],
        ["raw data", f"{format_bytes(source.raw_bytes)}, {', '.join(source.kinds)}, {plural(source.files, 'file')}"],
        ["as tokens", format_bytes(source.token_bytes) + ("" if change is None else f" ({100 * change:+.1f} %)")],
        ["left out", f"{format_count(source.rejected)} unusable, {format_count(source.duplicate_samples)} duplicates"],
        ["tokens of a sample", percentiles],
        ["mean tokens of a sample", count(spread.mean_tokens() or 0.0)],
        ["longer than a row holds", format_share(spread.truncated_share(row_tokens - SPECIAL_TOKENS_PER_SAMPLE))],
        [f"waste, one sample to a row of {row_tokens}", format_share(spread.padding_waste(row_tokens))],
    ]
    return Table(caption="The dataset", headers=("what", "value"), rows=tuple(rows))


def _packing(one: ReportedProfile, runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """How full rows are: in the profile's layout, and in runs."""
    rows: list[list[str | None]] = []
    if one.fill_share is not None:
        rows.append([f"{one.profile.train.layout} rows, drawn from the dataset", format_share(one.fill_share)])
    for run in runs:
        if run.profile_path == one.path and run.run.steps:
            steps = run.run.steps
            share = sum(step.real_tokens for step in steps) / max(1, sum(step.slot_tokens for step in steps))
            rows.append([f"steps of {run.name}", format_share(share)])
    table = Table(
        caption="How full rows are", headers=("rows", "real tokens, of all places"), rows=tuple(rows), align="lr"
    )
    return (table,) if rows else ()
