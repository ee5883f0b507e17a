"""How long samples are, and what rows of the profile's length make of them."""

from autotune.core.dataset import SPECIAL_TOKENS_PER_SAMPLE, LengthDistribution
from autotune.core.units import format_bytes, format_count, format_share
from autotune.show.charts.drawing import Axis, Column, Columns, Rule
from autotune.show.histogram import doublings
from autotune.show.report.document import Block, Chart, Missing, Paragraph, Table
from autotune.show.report.figures import count, plural
from autotune.show.report.inputs import ReportedProfile, ReportedRun, part_of_each
from trainer.dataset import Manifest

_PERCENTILES = (10, 50, 75, 90, 99)


def lengths_of_each(profiles: tuple[ReportedProfile, ...], runs: tuple[ReportedRun, ...]) -> tuple[Block, ...]:
    """Of each dataset once, however many profiles are of it."""
    first: dict[tuple[str, int], ReportedProfile] = {}
    for one in profiles:
        if one.dataset is not None:
            first.setdefault(_key(one, one.dataset), one)
    return part_of_each(
        profiles,
        "lengths",
        lambda one: _lengths(one, runs, None if one.dataset is None else first[_key(one, one.dataset)]),
    )


def _key(one: ReportedProfile, manifest: Manifest) -> tuple[str, int]:
    return manifest.dataset_hash, one.profile.train.seq_length_tokens


def _lengths(one: ReportedProfile, runs: tuple[ReportedRun, ...], like: ReportedProfile | None) -> tuple[Block, ...]:
    """The dataset, the histogram of its lengths, and how full rows are."""
    if like is not None and like is not one:
        same = f"The dataset and the length of rows are those of {like.title}: its lengths stand there."
        return (Paragraph(words=(same,)), *_packing(one, runs))
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


def _chart(one: ReportedProfile, spread: LengthDistribution) -> Chart:
    row_tokens = one.profile.train.seq_length_tokens
    bins = doublings(spread.edges, spread.counts)
    drawn = [(first, end, samples) for first, end, samples in bins if end is not None]
    samples = spread.samples
    # On an axis of doublings nothing lies at 0: the first bin is as wide as the others.
    columns = tuple(Column(start=max(first, end / 2), end=end, value=n / samples) for first, end, n in drawn)
    rows = tuple(
        [f"{format_count(first)} or more" if end is None else f"{format_count(first)} to {format_count(end - 1)}",
         format_count(n), format_share(n / samples)]
        for first, end, n in bins
    )  # fmt: skip
    fits = row_tokens - SPECIAL_TOKENS_PER_SAMPLE
    beyond = sum(n for _, end, n in bins if end is None)
    return Chart(
        title="Lengths of samples",
        description=(
            f"{_percentiles(spread)}. {format_share(spread.truncated_share(fits))} are longer than the {fits} tokens "
            f"that a row holds beside special ones; {format_share(beyond / samples)} lie to the right of what is "
            "drawn. Each bar spans twice the lengths of the one before it."
        ),
        drawing=Columns(
            x=Axis(label="tokens of a sample", unit="count", log=2, ticks=tuple(float(end) for _, end, _ in drawn)),
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
    ran = [run for run in runs if run.profile_path == one.path and run.run.steps]
    for run in ran:
        steps = run.run.steps
        share = sum(step.real_tokens for step in steps) / max(1, sum(step.slot_tokens for step in steps))
        rows.append([f"steps of {run.name}", format_share(share)])
    table = Table(
        caption="How full rows are", headers=("rows", "real tokens, of all places"), rows=tuple(rows), align="lr"
    )
    return (table,) if rows else ()
