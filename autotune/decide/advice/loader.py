"""Advice on data and loader workers: the paper's first three recommendations, and what comes after them."""

import statistics
from collections import Counter

from autotune.core.advice import Advice, Change, Figure, Gain
from autotune.core.evidence import WorkersRow
from autotune.core.interval import CONFIDENCE
from autotune.core.units import format_seconds
from autotune.decide.advice.gains import without
from autotune.decide.advice.situation import PERSISTENT_SHARE, Situation, on_host, part_figure
from autotune.decide.bottleneck import rows_of_this_start

STARVED_SHARE = 0.03
"""Waiting for data that is worth a word: what a count that is proven to be enough may cost, and a little."""
LEFT_WAITING_SHARE = 0.1
"""Of the wait that enough workers, or a local disk, leave; at worst."""
LEAST_ROWS = 4
BEHIND_RATIO = 2.0
"""A loader whose rank waits so many times as long as rank 0 is behind it, and not just the unluckiest of many."""

TOKENS_PER_RAW = {
    "elf": (0.15, 0.5, 1.0),
    "text": (0.3, 0.45, 0.9),
    "jsonl": (0.15, 0.3, 0.8),
    "parquet": (0.2, 1.0, 2.5),
}
"""Bytes of token ids per byte of raw files, least, usual and most. Programs, from 0.2 (servers) to 0.75 (libraries),
and text and JSON lines were measured; Parquet, which is compressed already, is assumed."""


def raw_data(now: Situation) -> Advice | None:
    """Raw files that are read for training, where token ids made once would do."""
    data = now.data
    if data is None or data.prepared or not data.kinds or data.raw_bytes is None:
        return None
    kind = data.kinds[0]
    low, usual, high = TOKENS_PER_RAW[kind]
    return Advice(
        rule="raw-data",
        severity="should",
        claim=f"{data.path} holds raw data ({', '.join(data.kinds)}): as token ids, made once, it is read much faster",
        evidence=(
            Figure(name="raw files", value=float(data.raw_bytes), unit="bytes", source=data.path),
            Figure(
                name="token ids per raw byte", value=usual, unit="ratio", low=low, high=high, known="assumed",
                source="datasets of this kind",
            ),
        ),
        gain=Gain(of="storage", ratio=usual, low=low, high=high, known="predicted"),
        cost="processor time once: some minutes for each ten gigabytes and core; the raw files stay",
        command=now.command("data", "prepare", f"{kind}:{data.path}", "--out", "DATASET"),
        would_change="samples that are different in every epoch, such as random parts of longer texts",
    )  # fmt: skip


def staging(now: Situation) -> Advice | None:
    """A dataset on a file system that all nodes share, and no copy of it on their own disks."""
    if now.train is None or now.train.data.stage_to is not None:
        return None
    workers, data = now.workers, now.data
    on_network = (data is not None and data.on_network) or (workers is not None and workers.data_on_network)
    if not on_network:
        return None
    kind = (
        (data.filesystem if data is not None else None) or (workers.data_filesystem if workers else None) or "network"
    )
    evidence = []
    row = now.workers_row(now.train.data.loader_workers)
    if row is not None and row.storage_bytes_per_s is not None:
        evidence.append(
            Figure(
                name="read from storage by one node", value=row.storage_bytes_per_s, unit="bytes/s",
                n=len(row.slot_tokens_per_s), source="windows of training",
            )
        )  # fmt: skip
    waits = now.loss("input", STARVED_SHARE)
    if waits is not None and now.bottleneck is not None:
        evidence.append(part_figure(waits, "waiting for data", now.bottleneck.steps))
    if data is not None and data.token_bytes is not None:
        evidence.append(Figure(name="dataset", value=float(data.token_bytes), unit="bytes", source=data.path))
    return Advice(
        rule="staging",
        severity="should",
        claim=f"the dataset lies on {kind}, which all nodes and other people read: copy it to each node's own disk",
        evidence=tuple(evidence),
        gain=None if waits is None else without(waits, left=LEFT_WAITING_SHARE, left_low=0.0, left_high=1.0),
        cost="the copy, before the first step, and room on the nodes' disks",
        changes=(Change(key="data.stage_to", old=None, new="$TMPDIR"),),
        command=f'{now.command("data", "stage", now.data_path, "--to")} "$TMPDIR"',
        would_change="memory of the nodes that holds all of the dataset from the first epoch on",
    )


def more_workers(now: Situation) -> Advice | None:
    """Devices that wait for data."""
    waits = now.loss("input", STARVED_SHARE)
    if now.train is None or waits is None or now.bottleneck is None:
        return None
    if starved_rank(now) is not None:
        return None
    count, workers = now.train.data.loader_workers, now.workers
    evidence = [part_figure(waits, "waiting for data", now.bottleneck.steps)]
    chosen = None if workers is None else now.workers_row(workers.chosen)
    known = workers is not None and workers.fed and not workers.undecided_between and workers.joint is None
    if workers is not None and chosen is not None and chosen.verdict == "proven" and known and workers.chosen > count:
        evidence.append(_ratio_figure(chosen))
        return Advice(
            rule="more-workers",
            severity="should",
            claim=f"{waits.share:.0%} of the step waits for data with {count} loader workers; "
            f"{workers.chosen} were measured to be enough",
            evidence=tuple(evidence),
            gain=_measured_gain(now.workers_row(count), chosen)
            or without(waits, left=0.0, left_low=0.0, left_high=LEFT_WAITING_SHARE),
            cost=f"{workers.chosen - count} more processes on each rank, and their memory",
            changes=(Change(key="data.loader_workers", old=count, new=workers.chosen),),
            would_change="a processor with fewer cores, or slower storage than where they were counted",
            safe=True,
        )
    if workers is not None and workers.fed and workers.chosen == count and now.run is None:
        return None
    return Advice(
        rule="more-workers",
        severity="should",
        claim=f"{waits.share:.0%} of the step waits for data with {count} loader workers",
        evidence=tuple(evidence),
        gain=without(waits, left=LEFT_WAITING_SHARE, left_low=0.0, left_high=1.0),
        cost="a few minutes of this machine; more workers take processors and memory",
        command=now.command("workers", "--profile", now.profile_path),
        would_change="storage that gives no more: then a copy on a local disk helps, and workers do not",
    )


def starved_rank(now: Situation) -> Advice | None:
    """One rank whose loader is behind all others', step after step."""
    lost = now.loss("input", STARVED_SHARE)
    if now.run is None or lost is None:
        return None
    rows = [row for row in rows_of_this_start(now.run) if row.longest_data_wait_s is not None]
    ((rank, times),) = Counter(row.longest_data_wait_rank for row in rows).most_common(1) or [(0, 0)]
    longest = statistics.fmean(row.longest_data_wait_s or 0.0 for row in rows) if rows else 0.0
    own = statistics.fmean(row.data_wait_s for row in rows) if rows else 0.0
    # Of the others only rank 0's own wait is in the record, so a rank 0 that is behind cannot be told from all of them.
    if len(rows) < LEAST_ROWS or not rank or times < PERSISTENT_SHARE * len(rows) or longest < BEHIND_RATIO * own:
        return None
    return Advice(
        rule="starved-rank",
        severity="should",
        claim=f"rank {rank}{on_host(now.run.header.hosts, rank)} waits {format_seconds(longest)} of a step for its "
        f"loader where rank 0 waits {format_seconds(own)}, and every step waits for it",
        evidence=(
            part_figure(lost, "waiting for data", len(rows)),
            Figure(
                name="longest wait of any rank", value=longest, unit="s", n=len(rows),
                source=f"run {now.run.directory.name}",
            ),
            Figure(name="rank 0's wait", value=own, unit="s", n=len(rows), source=f"run {now.run.directory.name}"),
        ),
        gain=without(lost, left=own / longest, left_low=0.0, left_high=1.0),
        cost="another node in its place, if its disk or its processors stay slow: SLURM takes a list of nodes to leave "
        "out in the site file; more loader workers would help that rank only",
        command="autotune doctor",
        would_change="the next slowest loader, which nobody recorded",
    )  # fmt: skip


def fewer_workers(now: Situation) -> Advice | None:
    """More loader workers than were shown to be needed."""
    workers = now.workers
    if now.train is None or workers is None or workers.undecided_between:
        return None
    count, chosen = now.train.data.loader_workers, now.workers_row(workers.chosen)
    if chosen is None or chosen.verdict != "proven" or count <= workers.chosen:
        return None
    if not workers.fed or now.loss("input", STARVED_SHARE) is not None:  # devices starve: this is no time for fewer
        return None
    row = now.workers_row(count)
    memory = None
    if row is not None and row.memory_bytes and chosen.memory_bytes:
        memory = Gain(of="host memory", ratio=chosen.memory_bytes / row.memory_bytes, known="measured")
    return Advice(
        rule="fewer-workers",
        severity="could",
        claim=f"{workers.chosen} loader workers keep the step fed; the profile has {count}",
        evidence=(_ratio_figure(chosen),),
        gain=memory,
        cost="none that was seen: the bound of the measured ratio is in the evidence",
        changes=(Change(key="data.loader_workers", old=count, new=workers.chosen),),
        would_change="slower storage or processors than where they were counted",
        safe=now.run is None,
    )


def undecided_workers(now: Situation) -> Advice | None:
    """A sweep that noise did not let end."""
    workers = now.workers
    if workers is None or not workers.undecided_between:
        return None
    low, high = workers.undecided_between
    minutes = max(10, round(4 * workers.seconds / 60))
    return Advice(
        rule="undecided-workers",
        severity="note",
        claim=f"the number of loader workers is undecided between {low} and {high}: what was measured is too noisy",
        evidence=tuple(_ratio_figure(row) for row in workers.rows if low <= row.loader_workers <= high),
        gain=None,
        cost=f"about {minutes} minutes of this machine",
        command=now.command("workers", "--profile", now.profile_path, "--minutes", str(minutes)),
        would_change="a quieter machine",
    )


def _ratio_figure(row: WorkersRow) -> Figure:
    name = f"{row.loader_workers} loader workers, of the step on batches from memory"
    return Figure.of(row.ratio, name=name, unit="ratio", n=len(row.slot_tokens_per_s), source="autotune workers")


def _measured_gain(old: WorkersRow | None, new: WorkersRow) -> Gain | None:
    if old is None:
        return None
    ratio, low, high, confidence = new.ratio_to_ceiling / old.ratio_to_ceiling, None, None, None
    if None not in (old.ratio_low, old.ratio_high, new.ratio_low, new.ratio_high):
        low = (new.ratio_low or 0.0) / (old.ratio_high or 1.0)
        high = (new.ratio_high or 0.0) / (old.ratio_low or 1.0)
        confidence = 1 - 2 * (1 - CONFIDENCE)  # at least: both lie within theirs (Bonferroni)
    return Gain(of="real tokens/s", ratio=ratio, low=low, high=high, confidence=confidence, known="measured")
