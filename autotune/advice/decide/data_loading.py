"""Advice on data and DataLoader workers.

The rules include the paper's first three recommendations.
"""

import shlex
import statistics
from collections import Counter

from autotune.advice.decide.bottleneck import steps_of_this_start
from autotune.advice.decide.context import (
    PERSISTENT_SHARE,
    Range,
    TrainingContext,
    on_host,
    without,
)
from autotune.advice.decide.rule import rule
from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.units import format_percent, format_seconds
from autotune.evidence.advice import Advice, EvidenceFigure, Gain, SettingChange, figure
from autotune.evidence.workers import WorkersRow
from autotune.workers.decide.data_shortage import (
    grows_with_workers,
    is_short_of_data,
)

STARVED_SHARE = 0.03
"""Least share of waiting for data that is reported: slightly more than a verified
worker count may leave."""
LEFT_WAITING_SHARE = 0.1
"""Share of the data wait that remains: at most with a verified worker count, usually
with other remedies."""
TOKENS_PER_RAW: dict[str, Range] = {
    "elf": (0.15, 0.5, 1.0),
    "text": (0.3, 0.45, 0.9),
    "jsonl": (0.15, 0.3, 0.8),
    "parquet": (0.2, 1.0, 2.5),
}
"""Bytes of token ids per byte of raw files: least, usual and most. Measured for
programs (0.2 for servers, 0.75 for libraries), text and JSON lines; assumed for
Parquet, which is compressed already."""


@rule("R1, data loading")
def tokenise_ahead(now: TrainingContext) -> Advice | None:
    """Find raw files used for training that could be pre-tokenised once."""
    data = now.data
    if data is None or data.prepared or not data.kinds or data.raw_bytes is None:
        return None
    kind = data.kinds[0]
    low, usual, high = TOKENS_PER_RAW[kind]
    ratio = Interval(value=usual, low=low, high=high)
    return Advice(
        claim=(
            f"{data.path} holds raw data ({', '.join(data.kinds)}): pre-tokenise it"
            " once and train from token ids"
        ),
        evidence=(
            figure("raw files", data.raw_bytes, "bytes", data.path),
            figure(
                "token ids per raw byte",
                ratio,
                "ratio",
                "datasets of this kind",
                known="assumed",
            ),
        ),
        gain=Gain(of="storage", ratio=usual, low=low, high=high),
        cost="CPU time once: some minutes per 10 GB and core; the raw files stay",
        command=shlex.join(
            ["autotune", "data", "prepare", f"{kind}:{data.path}", "--out", "DATASET"]
        ),
        would_change=(
            "samples that differ in every epoch, such as random parts of longer texts"
        ),
    )


@rule("R2, data loading")
def staging(now: TrainingContext) -> Advice | None:
    """Find a dataset on a shared file system without a copy on local disks."""
    workers = now.evidence.workers
    data = now.data
    filesystem = None
    if workers is not None and workers.data_on_network:
        filesystem = workers.data_filesystem or "network"
    if data is not None and data.on_network:
        filesystem = data.filesystem or filesystem or "network"
    if now.subject is None or filesystem is None:
        return None
    if now.train is not None and now.train.data.stage_to is not None:
        return None
    evidence = []
    row = now.workers_row()
    if row is not None and row.storage_bytes_per_s is not None:
        evidence.append(
            figure(
                "storage read by one node",
                row.storage_bytes_per_s,
                "bytes/s",
                "timed windows",
                n=len(row.units_per_s),
            )
        )
    waits = now.loss("data loading", STARVED_SHARE)
    if waits is not None:
        evidence.append(now.part_figure(waits, "wait for data"))
    if data is not None and data.token_bytes is not None:
        evidence.append(figure("dataset", data.token_bytes, "bytes", data.path))
    changes: tuple[SettingChange, ...] = ()
    # Your code names the copy itself; the sweep then measures what it gains.
    command = now.workers_command()
    if now.train is not None:
        changes = (SettingChange(key="data.stage_to", old=None, new="$TMPDIR"),)
        command = f'autotune data stage {shlex.quote(now.data_path)} --to "$TMPDIR"'
    return Advice(
        claim=(
            f"the dataset is on a shared file system ({filesystem}): copy it to each"
            " node's local disk"
        ),
        evidence=tuple(evidence),
        gain=None if waits is None else without(waits, (0.0, LEFT_WAITING_SHARE, 1.0)),
        cost="time to copy before the first step, and space on the local disks",
        changes=changes,
        command=command,
        would_change="page cache that holds the whole dataset after the first epoch",
    )


@rule("R3, data loading")
def more_workers(now: TrainingContext) -> Advice | None:
    """Find devices that wait for data."""
    waits = now.loss("data loading", STARVED_SHARE)
    count = now.num_workers
    workers = now.evidence.workers
    if count is None or waits is None or starved_rank(now) is not None:
        return None
    evidence = now.part_figure(waits, "wait for data")
    chosen = None if workers is None else now.workers_row(workers.chosen)
    has_verified_count = (
        workers is not None
        and workers.keeps_up
        and not workers.undecided_between
        and workers.joint is None
        and chosen is not None
        and chosen.verdict == "verified"
    )
    if has_verified_count and chosen is not None and chosen.num_workers > count:
        return Advice(
            claim=(
                f"training waits for data {format_percent(waits.share)} of the step"
                f" with num_workers={count}; {chosen.num_workers}"
                " are verified to be sufficient"
            ),
            evidence=(evidence, _ratio_figure(chosen)),
            gain=_measured_gain(now.workers_row(), chosen)
            or without(waits, (0.0, 0.0, LEFT_WAITING_SHARE)),
            cost=(
                f"{chosen.num_workers - count} more processes per rank, and their"
                " memory"
            ),
            changes=(now.workers_change(chosen.num_workers),),
            would_change=(
                "fewer CPU cores or slower storage than on the measured machine"
            ),
            safe=True,
        )
    is_swept = workers is not None and workers.chosen == count
    if is_swept and now.run is None:
        return None  # the sweep decided; another one would not help
    return Advice(
        claim=(
            f"training waits for data {format_percent(waits.share)} of the step with"
            f" num_workers={count}"
        ),
        evidence=(evidence,),
        gain=without(waits, (0.0, LEFT_WAITING_SHARE, 1.0)),
        cost="a few minutes on this machine; more workers take CPU cores and memory",
        command=now.workers_command(),
        would_change=(
            "storage that is already at its limit: then copy the dataset to a local"
            " disk instead"
        ),
    )


@rule("R3, data loading")
def slow_loader(now: TrainingContext) -> Advice | None:
    """Find a loader that no number of DataLoader workers makes fast enough."""
    waits = now.loss("data loading", STARVED_SHARE)
    workers = now.evidence.workers
    if workers is None or waits is None or now.run is not None:
        return None
    if workers.chosen != now.num_workers or not is_short_of_data(workers):
        return None
    claim = (
        "no number of DataLoader workers keeps up: the loader itself is the limit, and"
        f" costs {format_percent(waits.share)} of the step"
    )
    cost = (
        "work on the loader: do expensive transforms once and store the result, read"
        " larger files, send smaller batches, or load on threads"
    )
    if grows_with_workers(workers):
        claim = (
            f"{workers.max_workers} DataLoader workers are the most that this machine"
            f" allows ({workers.max_workers_because}), and do not keep up: data"
            f" loading costs {format_percent(waits.share)} of the step"
        )
        cost = "more CPU cores per rank, or cheaper samples: do transforms once, ahead"
    return Advice(
        claim=claim,
        evidence=(
            now.part_figure(waits, "wait for data"),
            *(_ratio_figure(row) for row in workers.rows[-2:]),
        ),
        gain=without(waits, (0.0, LEFT_WAITING_SHARE, 1.0)),
        cost=cost,
        command=now.workers_command(),
        would_change="a slower training step, which such a loader keeps busy",
    )


@rule("data loading")
def starved_rank(now: TrainingContext) -> Advice | None:
    """Find one rank that waits longest for data in most steps."""
    waits = now.loss("data loading", STARVED_SHARE)
    if now.run is None or waits is None:
        return None
    rows = [
        row
        for row in steps_of_this_start(now.run)
        if row.longest_data_wait_s is not None
    ]
    if len(rows) < 4:
        return None
    slowest_ranks = Counter(row.longest_data_wait_rank for row in rows)
    ((rank, times),) = slowest_ranks.most_common(1)
    longest_s = statistics.fmean(row.longest_data_wait_s or 0.0 for row in rows)
    own_s = statistics.fmean(row.data_wait_s for row in rows)
    # The record has no wait of ranks other than 0, so a slow rank 0 looks like slow
    # data on all ranks. A rank that waits less than twice as long may be the slowest by
    # chance.
    if not rank or times < PERSISTENT_SHARE * len(rows) or longest_s < 2 * own_s:
        return None
    source = f"run {now.run.directory.name}"
    return Advice(
        claim=(
            f"rank {rank}{on_host(now.run.header.hosts, rank)} waits"
            f" {format_seconds(longest_s)} per step for data, rank 0 only"
            f" {format_seconds(own_s)}, and all ranks wait for the slowest"
        ),
        evidence=(
            now.part_figure(waits, "wait for data", len(rows)),
            figure("longest wait of any rank", longest_s, "s", source, n=len(rows)),
            figure("rank 0's wait", own_s, "s", source, n=len(rows)),
        ),
        gain=without(waits, (0.0, own_s / longest_s, 1.0)),
        cost=(
            "another node if its disk or CPU stays slow (exclude this one in the SLURM"
            " site file); more workers would help that rank only"
        ),
        command="autotune doctor",
        would_change="another rank that is nearly as slow, which runs do not record",
    )


@rule("R3")
def fewer_workers(now: TrainingContext) -> Advice | None:
    """Find more DataLoader workers than were verified to be needed."""
    workers = now.evidence.workers
    waits = now.loss("data loading", STARVED_SHARE)
    count = now.num_workers
    if (
        count is None
        or workers is None
        or workers.undecided_between
        or not workers.keeps_up
    ):
        return None
    chosen = now.workers_row(workers.chosen)
    if (
        waits is not None
        or chosen is None
        or chosen.verdict != "verified"
        or count <= workers.chosen
    ):
        return None
    row = now.workers_row()
    before_bytes = None if row is None else row.memory_bytes
    after_bytes = chosen.memory_bytes
    gain = None
    if before_bytes and after_bytes:
        ratio = after_bytes / before_bytes
        gain = Gain(of="host memory", ratio=ratio, known="measured")
    return Advice(
        claim=f"num_workers={workers.chosen} is sufficient; the profile has {count}",
        evidence=(_ratio_figure(chosen),),
        gain=gain,
        cost="none measured; the evidence has the confidence bounds",
        changes=(now.workers_change(workers.chosen),),
        would_change="slower storage or CPU than on the measured machine",
        safe=now.run is None,
    )


@rule("R3")
def undecided_workers(now: TrainingContext) -> Advice | None:
    """Find a sweep of DataLoader workers that noise left undecided."""
    workers = now.evidence.workers
    if workers is None or not workers.undecided_between:
        return None
    low, high = workers.undecided_between
    minutes = max(10, round(4 * workers.seconds / 60))
    return Advice(
        severity="info",
        claim=(
            f"num_workers is undecided between {low} and {high}: the measurements are"
            " too noisy"
        ),
        evidence=tuple(
            _ratio_figure(row) for row in workers.rows if low <= row.num_workers <= high
        ),
        cost=f"about {minutes} minutes on this machine",
        command=now.workers_command(time_limit=f"{minutes}min"),
        would_change="a quieter machine",
    )


@rule()
def contradicted_utilisation(now: TrainingContext) -> Advice | None:
    """Find GPU utilisation that contradicts throughput, as the sweep of workers says.

    The GPU is idle although data loading keeps up, or always busy although it does not.
    """
    workers = now.evidence.workers
    finding = None if workers is None else workers.utilisation_finding
    if workers is None or finding is None:
        return None
    busy = figure("utilisation", finding.utilisation_share, "share", "NVML")
    row = now.workers_row(workers.chosen)
    evidence = (busy,) if row is None else (busy, _ratio_figure(row))
    return Advice(
        severity="info",
        claim=finding.claim,
        evidence=evidence,
        cost="none",
        would_change="windows in which utilisation and throughput agree",
    )


def _ratio_figure(row: WorkersRow) -> EvidenceFigure:
    name = f"throughput with num_workers={row.num_workers} relative to cached batches"
    return figure(name, row.ratio, "share", "autotune workers", n=len(row.units_per_s))


def _measured_gain(old: WorkersRow | None, new: WorkersRow) -> Gain | None:
    if old is None:
        return None
    ratio = new.ratio_to_cached / old.ratio_to_cached
    if not (old.ratio_low and old.ratio_high and new.ratio_low and new.ratio_high):
        return Gain(ratio=ratio, known="measured")
    low = new.ratio_low / old.ratio_high
    high = new.ratio_high / old.ratio_low
    # Bonferroni: both ratios are within their bounds with at least this confidence.
    return Gain(
        ratio=ratio,
        low=low,
        high=high,
        confidence=1 - 2 * (1 - CONFIDENCE),
        known="measured",
    )
