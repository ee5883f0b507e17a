"""Sections on a sweep of DataLoader workers."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.base import document as doc
from autotune.base.document import bulleted, sentence, table_of
from autotune.base.render import console_text
from autotune.base.units import format_bytes, format_count, format_percent, format_share
from autotune.base.wording import (
    format_bytes_per_s,
    format_window_bounds,
    format_windows,
    plural,
)
from autotune.profiles.decide.follow_up import command, probe_first
from autotune.report.values import ReportedProfile
from autotune.workers.decide.worker_count import ENOUGH_SHARE
from autotune.workers.values import (
    VERDICT_WORDS,
    CountEvidence,
    CountRow,
    WorkersEvidence,
)


def workers_text(found: WorkersEvidence, profile: Path, data: Path) -> str:
    """Return the evidence and the next command, for the console."""
    train = command("train", profile, data=data)
    return console_text(
        (
            *_sweep(found),
            doc.Pairs(pairs=(("profile", (str(profile),)), ("next", (train,)))),
        )
    )


def workers_section(one: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the report's blocks on the sweep, with the command that decides an undecided count."""
    found = one.profile.evidence.workers
    read = found is not None and all(row.padded_tokens_per_s for row in found.rows)
    # As in some from elsewhere.
    if found is None or not (read and found.rows and found.cached_padded_tokens_per_s):
        commands = (
            *probe_first(one.profile, one.path),
            f"autotune workers {one.quoted}",
        )
        return (doc.Missing(subject="Number of DataLoader workers", commands=commands),)
    if not found.undecided_between:
        return _sweep(found)
    few, many = found.undecided_between[0], found.undecided_between[-1]
    minutes = max(10, round(4 * found.seconds / 60))
    again = f"autotune workers {one.quoted} --time-limit {minutes}min"
    return (
        *_sweep(found),
        doc.Missing(
            subject=f"Smallest sufficient num_workers, {few} to {many}",
            commands=(again,),
        ),
    )


def _sweep(found: WorkersEvidence) -> tuple[doc.Block, ...]:
    """Return the choice, throughput by workers, counters of GPUs if there are any, and the lines under them."""
    rates = [
        format_count(statistics.median(row.padded_tokens_per_s)) for row in found.rows
    ]
    table = count_table(found.rows, "tokens/s incl. padding (median)", rates)
    shown: doc.Block = table  # a single count makes no curve
    if len(found.rows) > 1:
        parts = [
            f"{row.num_workers}: {format_share(row.ratio_to_cached)}"
            for row in found.rows
        ]
        shown = doc.Chart(
            title=(
                "Throughput by number of DataLoader workers, relative to cached batches"
            ),
            description=(
                "Throughput relative to cached batches by num_workers:"
                f" {'; '.join(parts)}. Bars: 98 % CI."
            ),
            drawing=_drawing(found),
            table=table,
        )
    counters = table_of(
        "GPU counters in these windows",
        [(row, row.gpu) for row in found.rows if row.gpu is not None],
        ("num_workers", "r", lambda one: str(one[0].num_workers)),
        ("SMs busy", "r", lambda one: format_share(one[1].gpm_sm_share)),
        ("occupancy", "r", lambda one: format_share(one[1].gpm_occupancy_share)),
        ("Tensor Cores", "r", lambda one: format_share(one[1].gpm_tensor_share)),
        ("DRAM", "r", lambda one: format_share(one[1].gpm_dram_share)),
        (
            "PCIe in",
            "r",
            lambda one: format_bytes_per_s(one[1].gpm_pcie_rx_bytes_per_s),
        ),
        (
            "power",
            "r",
            lambda one: None if one[1].power_w is None else f"{one[1].power_w:.0f} W",
        ),
        (
            "SM clock",
            "r",
            lambda one: (
                None
                if one[1].sm_clock_mhz is None
                else f"{one[1].sm_clock_mhz:.0f} MHz"
            ),
        ),
        ("at power cap", "r", lambda one: format_share(one[1].power_capped_share)),
    )
    head = count_head("DataLoader workers", chosen_loader(found), found)
    return (
        head,
        shown,
        *((counters,) if counters.rows else ()),
        bulleted(workers_lines(found)),
    )


def count_head(title: str, chosen: str, found: CountEvidence) -> doc.Pairs:
    """Return the chosen count with its reason, and the next smaller one's result."""
    smaller = f". {sentence(found.next_smaller)}" if found.next_smaller else ""
    return doc.Pairs(
        pairs=((title, (doc.Strong(text=chosen), f" ({found.choice}){smaller}")),)
    )


def count_table(rows: Sequence[CountRow], rate: str, rates: Sequence[str]) -> doc.Table:
    """Return the table of windows by number of workers, with a column of rates."""
    return table_of(
        "Throughput by num_workers",
        list(zip(rows, rates, strict=True)),
        ("num_workers", "r", lambda one: str(one[0].num_workers)),
        (rate, "r", lambda one: one[1]),
        ("vs cached batches", "r", lambda one: f"{one[0].ratio_to_cached:.3f}"),
        (
            "98 % CI",
            "r",
            lambda one: format_window_bounds(one[0].ratio, "{:.3f}".format),
        ),
        ("data wait", "r", lambda one: format_share(one[0].data_wait_share)),
        (
            "GPU utilisation",
            "r",
            lambda one: format_share(
                one[0].gpu.utilisation_share if one[0].gpu else None
            ),
        ),
        ("RAM", "r", lambda one: format_bytes(one[0].memory_bytes)),
        ("verdict", "l", lambda one: VERDICT_WORDS[one[0].verdict]),
    )


def _drawing(found: WorkersEvidence) -> doc.LineChart:
    rows = sorted(found.rows, key=lambda row: row.num_workers)
    speed = tuple(
        doc.Point(
            x=row.num_workers,
            y=row.ratio_to_cached,
            low=row.ratio_low,
            high=row.ratio_high,
        )
        for row in rows
    )
    waits = tuple(doc.Point(x=row.num_workers, y=row.data_wait_share) for row in rows)
    shares = (
        (row.num_workers, None if row.gpu is None else row.gpu.utilisation_share)
        for row in rows
    )
    busy = tuple(
        doc.Point(x=workers, y=share) for workers, share in shares if share is not None
    )
    return doc.LineChart(
        x=doc.Axis(
            label="num_workers (per rank)",
            unit="count",
            ticks=tuple(point.x for point in speed),
        ),
        y=doc.Axis(label="share", unit="share", low=0),
        lines=(
            doc.Line(name="throughput vs cached batches", points=speed, colour=0),
            doc.Line(name="data wait", points=waits, colour=5),
            *(
                (doc.Line(name="GPU utilisation", points=busy, colour=2),)
                if busy
                else ()
            ),
        ),
        rules=(
            doc.ReferenceLine(
                value=ENOUGH_SHARE, label=f"sufficient: {format_percent(ENOUGH_SHARE)}"
            ),
        ),
    )


def chosen_loader(found: WorkersEvidence) -> str:
    """Return the chosen loader settings in a few words."""
    joint = found.joint
    if joint is None or not joint.adopted:
        return str(found.chosen)
    return (
        f"{joint.num_workers}, prefetch {joint.prefetch_factor},"
        f" {'' if joint.pin_memory else 'not '}pinned"
    )


def workers_lines(found: WorkersEvidence) -> Iterator[str]:
    """Yield the lines under the table."""
    cached = statistics.median(found.cached_padded_tokens_per_s)
    yield (
        f"upper bound without data loading (cached batches): {format_count(cached)}"
        " tokens/s including padding"
    )
    ranks = plural(found.local_ranks, "rank")
    yield (
        f"consumer: {found.consumer}; {ranks}, {found.windows} windows of at least"
        f" {found.window_s:g} s"
    )
    yield (
        f"largest num_workers allowed: {found.max_workers}"
        f" ({found.max_workers_because})"
    )
    disk = "" if found.data_filesystem is None else f"on {found.data_filesystem}, "
    rates = [
        row.storage_bytes_per_s
        for row in found.rows
        if row.storage_bytes_per_s is not None
    ]
    most = max(rates, default=None)
    rate = "an unknown rate" if most is None else f"up to {format_bytes_per_s(most)}"
    yield (
        f"dataset: {disk}read from"
        f" {'the page cache' if most == 0 else f'storage at {rate}'}"
    )
    yield f"GPU: {found.gpu_source}"
    if any(row.gpu for row in found.rows):
        yield (
            "GPU utilisation is the share of time in which any kernel runs; it is"
            " not MFU"
        )
    if found.operating_state:
        yield f"GPU state on cached batches: {found.operating_state}"
    best = max(row.ratio_to_cached for row in found.rows)
    if found.data_on_network:
        yield (
            f"the dataset is on a shared network file system ({found.data_filesystem});"
            " a copy on a local disk gains at most"
            f" {format_share(max(0.0, 1 / best - 1))}: autotune data stage DIR --to"
            " LOCAL"
        )
    highs = [row.ratio_high for row in found.rows if row.ratio_high is not None]
    joint = found.joint
    if (
        highs
        and max(highs) < ENOUGH_SHARE
        and not (found.keeps_up or (joint and joint.adopted))
    ):
        yield (
            "no number of workers is sufficient: data loading costs"
            f" {format_percent(1 - best)} of the throughput; use more CPU cores per rank,"
            " faster storage or shorter samples"
        )
    if joint:
        ratio = format_windows(joint.ratio, format_share)
        yield (
            f"joint search over workers, prefetching and pinning ({joint.trials}"
            f" trials): num_workers={joint.num_workers},"
            f" prefetch_factor={joint.prefetch_factor}, pin_memory={joint.pin_memory}:"
            f" {ratio} of the best num_workers alone,"
            f" {'adopted' if joint.adopted else 'not faster at 98 % confidence'}"
        )
