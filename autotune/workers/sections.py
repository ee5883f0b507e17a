"""Sections on a sweep of DataLoader workers, for the console and the report."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.base import document as doc
from autotune.base.document import bulleted
from autotune.base.render_console import console_text
from autotune.base.tables import Row
from autotune.base.units import (
    format_bytes,
    format_count,
    format_percent,
    format_share,
)
from autotune.base.wording import (
    format_bytes_per_s,
    format_times,
    format_windows,
    plural,
)
from autotune.evidence.gpu_use import GpuUse
from autotune.evidence.workers import BATCHES, JointChoice, WorkersEvidence
from autotune.profiles.decide.follow_up import (
    command,
    missing_probe_commands,
    workers_command,
)
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.store import WrittenProfile
from autotune.workers.count_tables import count_head, count_table
from autotune.workers.decide.data_shortage import (
    grows_with_workers,
    idle_counts,
    is_short_of_data,
)
from autotune.workers.throughput_chart import throughput_chart
from autotune.workers.windows import settings_words

LONGER_SWEEP = 4
"""Factor on the time of an undecided sweep, for the time limit of the next one. An
interval from four times as many windows is half as wide."""
LEAST_MINUTES = 10
"""Shortest time limit to suggest, in minutes: the default of the command."""


def workers_text(written: WrittenProfile, data: Path | None = None) -> str:
    """Return the result of a sweep and what to do next, for the console.

    Args:
        written: Profile that the sweep wrote.
        data: Dataset to train with; None if the profile names it.
    """
    evidence = written.profile.evidence.workers
    assert evidence is not None, "a sweep writes its evidence"
    following = command("train", written.path, data=data)
    if not written.profile.has_train:
        settings = settings_words(evidence.loader_settings)
        following = f"use {settings} in your loader"
    pairs = (("profile", (str(written.path),)), ("next", (following,)))
    return console_text((*sweep_blocks(evidence), doc.Pairs(pairs=pairs)))


def workers_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the report's blocks on the sweep.

    They end with the command that decides an undecided count.
    """
    evidence = reported.profile.evidence.workers
    if evidence is None or not _has_windows(evidence):
        commands = (
            *missing_probe_commands(reported.profile, reported.path),
            workers_command(reported.profile, reported.path),
        )
        return (doc.Missing(subject="Number of DataLoader workers", commands=commands),)
    blocks = sweep_blocks(evidence)
    if not evidence.undecided_between:
        return blocks
    fewest = evidence.undecided_between[0]
    most = evidence.undecided_between[-1]
    minutes = max(LEAST_MINUTES, round(LONGER_SWEEP * evidence.seconds / 60))
    undecided = doc.Missing(
        subject=f"Smallest sufficient num_workers, {fewest} to {most}",
        commands=(
            workers_command(
                reported.profile, reported.path, time_limit=f"{minutes}min"
            ),
        ),
    )
    return (*blocks, undecided)


def _has_windows(evidence: WorkersEvidence) -> bool:
    """Return True if every row and the cached batches have windows.

    Profiles may lack them, as empty lists are valid.
    """
    if not evidence.rows or not evidence.cached_units_per_s:
        return False
    return all(row.units_per_s for row in evidence.rows)


def sweep_blocks(evidence: WorkersEvidence) -> tuple[doc.Block, ...]:
    """Return the choice, the throughput by workers, GPU counters if any, and notes."""
    rates = [_median_rate(evidence, row.units_per_s) for row in evidence.rows]
    table = count_table(evidence.rows, f"{evidence.rate_unit} (median)", rates)
    throughput: doc.Block = table
    # A single count makes no curve.
    if len(evidence.rows) > 1:
        throughput = throughput_chart(evidence, table)
    blocks: list[doc.Block] = [
        count_head("DataLoader workers", chosen_loader(evidence), evidence),
        throughput,
    ]
    counters = _counters(evidence)
    if counters.rows:
        blocks.append(counters)
    blocks.append(bulleted(workers_lines(evidence)))
    return tuple(blocks)


def _median_rate(evidence: WorkersEvidence, units_per_s: Sequence[float]) -> str:
    """Return the median of a rate as a number, with two decimals for batches."""
    digits = 2 if evidence.unit == BATCHES else 0
    return format_count(statistics.median(units_per_s), digits)


def _counters(evidence: WorkersEvidence) -> doc.Table:
    """Return the GPU counters of windows; without rows on a CPU."""
    headers = (
        "num_workers",
        "SMs busy",
        "occupancy",
        "Tensor Cores",
        "DRAM",
        "PCIe in",
        "power",
        "SM clock",
        "at power cap",
    )
    return doc.Table(
        caption="GPU counters in these windows",
        headers=headers,
        rows=tuple(
            _counter_cells(row.num_workers, row.gpu)
            for row in evidence.rows
            if row.gpu is not None
        ),
        align="r" * len(headers),
    )


def _counter_cells(num_workers: int, gpu: GpuUse) -> Row:
    power = None if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    clock = None if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz:.0f} MHz"
    return [
        str(num_workers),
        format_share(gpu.gpm_sm_share),
        format_share(gpu.gpm_occupancy_share),
        format_share(gpu.gpm_tensor_share),
        format_share(gpu.gpm_dram_share),
        format_bytes_per_s(gpu.gpm_pcie_rx_bytes_per_s),
        power,
        clock,
        format_share(gpu.power_capped_share),
    ]


def chosen_loader(evidence: WorkersEvidence) -> str:
    """Return the chosen loader settings in a few words."""
    joint = evidence.joint
    if joint is None or not joint.adopted:
        return str(evidence.chosen)
    words = [str(joint.num_workers)]
    if joint.prefetch_factor is not None:
        words.append(f"prefetch {joint.prefetch_factor}")
    if joint.pin_memory is not None:
        words.append("pinned" if joint.pin_memory else "not pinned")
    return ", ".join(words)


def workers_lines(evidence: WorkersEvidence) -> Iterator[str]:
    """Yield the lines under the table."""
    yield from _setup_lines(evidence)
    yield from _loader_lines(evidence)
    yield _dataset_line(evidence)
    yield from _gpu_lines(evidence)
    yield from _data_loading_lines(evidence)
    if evidence.joint:
        yield _joint_line(evidence.joint)


def _setup_lines(evidence: WorkersEvidence) -> Iterator[str]:
    """Yield the lines on the windows that were measured."""
    padding = " including padding" if evidence.counts_padding else ""
    yield (
        "upper bound without data loading (cached batches):"
        f" {_median_rate(evidence, evidence.cached_units_per_s)}"
        f" {evidence.unit}/s{padding}"
    )
    ranks = plural(evidence.local_ranks, "rank")
    yield (
        f"consumer: {evidence.consumer}; {ranks}, {plural(evidence.windows, 'window')}"
        f" of at least {evidence.window_s:g} s"
    )
    yield (
        f"largest num_workers allowed: {evidence.max_workers}"
        f" ({evidence.max_workers_because})"
    )


def _loader_lines(evidence: WorkersEvidence) -> Iterator[str]:
    """Yield the lines on the loader's workers, batches and epochs."""
    if evidence.worker_bytes is not None and evidence.batch_bytes is not None:
        yield (
            f"a worker holds {format_bytes(evidence.worker_bytes)} of private memory; a"
            f" batch has {format_bytes(evidence.batch_bytes)}"
        )
    if evidence.epoch_batches is not None:
        yield (
            f"an epoch has {plural(evidence.epoch_batches, 'batch')}: restarting the"
            " loader is part of its cost"
        )
    idle = idle_counts(evidence)
    if idle:
        yield (
            f"with num_workers={idle[-1]} the loader started fewer processes: it"
            " ignores num_workers, or uses threads"
        )


def _gpu_lines(evidence: WorkersEvidence) -> Iterator[str]:
    """Yield the lines on the GPUs' figures."""
    yield f"GPU: {evidence.gpu_source}"
    if any(row.gpu for row in evidence.rows):
        yield (
            "GPU utilisation is the share of time in which any kernel runs; it is"
            " not MFU"
        )
    if evidence.utilisation_finding is not None:
        yield evidence.utilisation_finding.sentence
    if evidence.operating_state:
        yield f"GPU state on cached batches: {evidence.operating_state}"


def _data_loading_lines(evidence: WorkersEvidence) -> Iterator[str]:
    """Yield the lines on what faster data loading would gain."""
    best_ratio = max(row.ratio_to_cached for row in evidence.rows)
    if evidence.data_on_network:
        most_gain = max(0.0, 1 / best_ratio - 1)
        yield (
            "the dataset is on a shared network file system"
            f" ({evidence.data_filesystem}); a copy on a local disk gains at most"
            f" {format_share(most_gain)}: autotune data stage DIR --to LOCAL"
        )
    if is_short_of_data(evidence):
        remedy = "the loader itself is the limit, not its workers"
        if grows_with_workers(evidence):
            remedy = (
                "use more CPU cores per rank, faster storage, or shorter or cheaper"
                " samples"
            )
        yield (
            "no number of workers is sufficient: data loading costs"
            f" {format_percent(1 - best_ratio)} of the throughput; {remedy}"
        )


def _dataset_line(evidence: WorkersEvidence) -> str:
    disk = ""
    if evidence.data_filesystem is not None:
        disk = f"on {evidence.data_filesystem}, "
    rates_bytes_per_s = [
        row.storage_bytes_per_s
        for row in evidence.rows
        if row.storage_bytes_per_s is not None
    ]
    if not rates_bytes_per_s:
        source = "storage at an unknown rate"
    elif max(rates_bytes_per_s) == 0:
        source = "the page cache"
    else:
        source = f"storage at up to {format_bytes_per_s(max(rates_bytes_per_s))}"
    return f"dataset: {disk}read from {source}"


def _joint_line(joint: JointChoice) -> str:
    ratio = format_windows(joint.ratio, format_times)
    return (
        f"joint search over workers, prefetching and pinning ({joint.trials}"
        f" trials): {settings_words(joint.settings)}:"
        f" {ratio} the throughput of the best num_workers alone, {joint.result_words}"
    )
