"""Text and report blocks about the DataLoader workers of your own loader."""

import statistics
from collections.abc import Iterator

from autotune.base import document as doc
from autotune.base.document import bulleted
from autotune.base.render_console import console_text
from autotune.base.units import (
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
)
from autotune.base.wording import plural
from autotune.evidence.workers import LoaderEvidence
from autotune.profiles.decide.follow_up import missing_probe_commands, workers_command
from autotune.profiles.reported_profile import ReportedProfile
from autotune.profiles.store import WrittenProfile
from autotune.workers.count_tables import count_head, count_table
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE

_LIMITED_BY_LOADER = 1.05
"""Gain of the most workers over half as many, below which more of them would not help
either."""


def own_workers_text(written: WrittenProfile) -> str:
    """Return the result of a sweep for people."""
    found = written.profile.evidence.loader
    assert found is not None
    pairs = (
        ("profile", (str(written.path),)),
        ("next", (f"use num_workers={found.chosen} in your loader",)),
    )
    return console_text((*loader_blocks(found), doc.Pairs(pairs=pairs)))


def loader_section(reported: ReportedProfile) -> tuple[doc.Block, ...]:
    """Return the report's blocks on the loader's workers."""
    profile = reported.profile
    evidence = profile.evidence.loader
    if evidence is None or not _has_windows(evidence):
        commands = (
            *missing_probe_commands(profile, reported.path),
            workers_command(profile, reported.path),
        )
        return (doc.Missing(subject="Number of DataLoader workers", commands=commands),)
    return loader_blocks(evidence)


def _has_windows(evidence: LoaderEvidence) -> bool:
    """Return True if every row and the cached batches have windows.

    Profiles may lack them, as empty lists are valid.
    """
    if not evidence.rows or not evidence.cached_batches_per_s:
        return False
    return all(row.batches_per_s for row in evidence.rows)


def loader_blocks(found: LoaderEvidence) -> tuple[doc.Block, ...]:
    """Return the choice, the throughput by number of workers, and notes."""
    rates = [
        format_count(statistics.median(row.batches_per_s), 2) for row in found.rows
    ]
    table = count_table(found.rows, "batches/s (median)", rates)
    return (
        count_head("Workers", str(found.chosen), found),
        table,
        bulleted(_loader_lines(found)),
    )


def _loader_lines(found: LoaderEvidence) -> Iterator[str]:
    cached = statistics.median(found.cached_batches_per_s)
    yield (
        f"upper bound without data loading (cached batches): {format_count(cached, 2)}"
        " batches/s"
    )
    replayed_s = found.replayed_step_s
    step = (
        "your step"
        if replayed_s is None
        else f"a replayed step of {format_seconds(replayed_s)}"
    )
    yield (
        f"consumer: {step}; {plural(found.windows, 'window')} of at least"
        f" {found.window_s:g} s"
    )
    yield (
        f"largest num_workers allowed: {found.max_workers}"
        f" ({found.max_workers_because})"
    )
    if found.worker_bytes is not None:
        held = f"a worker holds {format_bytes(found.worker_bytes)} of private memory"
        yield f"{held}; a batch has {format_bytes(found.batch_bytes)}"
    if found.epoch_batches is not None:
        yield (
            f"an epoch has {plural(found.epoch_batches, 'batch')}: restarting the"
            " loader is part of its cost"
        )
    idle = [row.num_workers for row in found.rows if row.num_workers > row.processes]
    if idle:
        yield (
            f"with num_workers={idle[-1]} the loader started fewer processes: it"
            " ignores num_workers, or uses threads"
        )
    yield f"GPU: {found.gpu_source}"
    best = max(row.ratio_to_cached for row in found.rows)
    if min(row.data_wait_share for row in found.rows) < (1 - best) / 2:
        return  # windows that differ so much for another reason
    if (
        found.keeps_up
        or max(row.ratio_high or _LIMITED_BY_LOADER * best for row in found.rows)
        >= ENOUGH_SHARE
    ):
        return
    most = max(found.rows, key=lambda row: row.num_workers)
    half = [
        row.ratio_to_cached
        for row in found.rows
        if row.num_workers <= most.num_workers / 2
    ]
    grows = half and not idle and most.ratio_to_cached > _LIMITED_BY_LOADER * max(half)
    limit = "the loader itself is the limit, not its workers"
    more = "more CPU cores, or a cheaper sample, would help" if grows else limit
    yield (
        f"no number of workers is sufficient:"
        f" data loading costs {format_percent(1 - best)} of the throughput; {more}"
    )
