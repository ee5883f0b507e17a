"""Sections on a sweep of DataLoader workers."""

import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path

from autotune.base.document import (
    Axis,
    Block,
    Chart,
    Line,
    Lines,
    Missing,
    Pairs,
    Point,
    Rule,
    Strong,
    sentence,
    table_of,
    told,
)
from autotune.base.render import console_text
from autotune.base.units import format_bytes, format_count, format_share
from autotune.base.wording import of_windows, per_s, plural, window_bounds
from autotune.profiles.decide.follow_up import probe_first
from autotune.report.values import ReportedProfile
from autotune.workers.decide.worker_count import ENOUGH_SHARE
from autotune.workers.values import WorkersEvidence

_VERDICTS = {"verified": "enough", "refuted": "too few", "open": "undecided"}


def workers_text(found: WorkersEvidence, profile: Path, data: Path) -> str:
    """Return the evidence and the next command, for the console."""
    paths = shlex.join([str(profile), "--data", str(data)])
    train = f"torchrun --nproc-per-node {found.local_ranks} -m trainer {paths}"
    return console_text((*_sweep(found), Pairs(pairs=(("profile", (str(profile),)), ("next", (train,))))))


def workers_section(one: ReportedProfile) -> tuple[Block, ...]:
    """Return the report's blocks on the sweep, with the command that settles what it left open."""
    found = one.profile.evidence.workers
    # A profile of strangers may have evidence that says nothing.
    if (
        found is None
        or not (found.cached_padded_tokens_per_s and found.rows)
        or not all(row.padded_tokens_per_s for row in found.rows)
    ):
        command = f"autotune workers {one.quoted}"
        return (Missing(what="The number of loader workers", commands=(*probe_first(one.profile, one.path), command)),)
    if not found.undecided_between:
        return _sweep(found)
    few, many = found.undecided_between[0], found.undecided_between[-1]
    minutes = max(10, round(4 * found.seconds / 60))
    command = f"autotune workers {one.quoted} --time-limit {minutes}min"
    return (*_sweep(found), Missing(what=f"Which of {few} to {many} loader workers is enough", commands=(command,)))


def _sweep(found: WorkersEvidence) -> tuple[Block, ...]:
    """Return the choice, throughput by workers, counters of GPUs if there are any, and the lines under them."""
    table = table_of(
        "Throughput by loader workers", found.rows,
        ("loader workers", "r", lambda row: str(row.num_workers)),
        ("slot tokens/s (median)", "r", lambda row: format_count(statistics.median(row.padded_tokens_per_s))),
        ("of the ceiling", "r", lambda row: f"{row.ratio_to_cached:.3f}"),
        ("98 % interval", "r", lambda row: window_bounds(row.ratio, "{:.3f}".format)),
        ("data wait", "r", lambda row: format_share(row.data_wait_share)),
        ("GPU utilisation", "r", lambda row: format_share(row.gpu.utilisation_share if row.gpu else None)),
        ("RAM", "r", lambda row: format_bytes(row.memory_bytes)),
        ("verdict", "l", lambda row: _VERDICTS[row.verdict]),
    )  # fmt: skip
    shown: Block = table  # a single count makes no curve
    if len(found.rows) > 1:
        parts = [f"{row.num_workers}: {format_share(row.ratio_to_cached)}" for row in found.rows]
        shown = Chart(
            title="Throughput by loader workers, against the same step fed from memory",
            description=f"Share of the ceiling by loader workers: {'; '.join(parts)}. Bars are 98 % intervals.",
            drawing=_drawing(found),
            table=table,
        )
    counters = table_of(
        "What the GPUs did in those windows", [(row, row.gpu) for row in found.rows if row.gpu is not None],
        ("loader workers", "r", lambda one: str(one[0].num_workers)),
        ("SMs busy", "r", lambda one: format_share(one[1].gpm_sm_share)),
        ("occupancy", "r", lambda one: format_share(one[1].gpm_occupancy_share)),
        ("tensor", "r", lambda one: format_share(one[1].gpm_tensor_share)),
        ("DRAM", "r", lambda one: format_share(one[1].gpm_dram_share)),
        ("PCIe in", "r", lambda one: per_s(one[1].gpm_pcie_rx_bytes_per_s)),
        ("power", "r", lambda one: None if one[1].power_w is None else f"{one[1].power_w:.0f} W"),
        ("SM clock", "r", lambda one: None if one[1].sm_clock_mhz is None else f"{one[1].sm_clock_mhz:.0f} MHz"),
        ("at the cap", "r", lambda one: format_share(one[1].power_capped_share)),
    )  # fmt: skip
    smaller = f". {sentence(found.next_smaller)}" if found.next_smaller else ""
    chosen = (Strong(text=chosen_loader(found)), f" ({found.choice}){smaller}")
    return (
        Pairs(pairs=(("loader workers", chosen),)),
        shown,
        *((counters,) if counters.rows else ()),
        told(workers_lines(found)),
    )


def _drawing(found: WorkersEvidence) -> Lines:
    rows = sorted(found.rows, key=lambda row: row.num_workers)
    speed = tuple(
        Point(x=row.num_workers, y=row.ratio_to_cached, low=row.ratio_low, high=row.ratio_high) for row in rows
    )
    waits = tuple(Point(x=row.num_workers, y=row.data_wait_share) for row in rows)
    shares = ((row.num_workers, None if row.gpu is None else row.gpu.utilisation_share) for row in rows)
    busy = tuple(Point(x=workers, y=share) for workers, share in shares if share is not None)
    return Lines(
        x=Axis(label="loader workers of a rank", unit="count", ticks=tuple(point.x for point in speed)),
        y=Axis(label="share", unit="share", low=0),
        lines=(
            Line(name="tokens/s, of the ceiling", points=speed, colour=0),
            Line(name="waiting for data", points=waits, colour=5),
            *((Line(name="GPU utilisation", points=busy, colour=2),) if busy else ()),
        ),
        rules=(Rule(at=ENOUGH_SHARE, label=f"enough: {ENOUGH_SHARE:.0%}"),),
    )


def chosen_loader(found: WorkersEvidence) -> str:
    """Return the chosen loader settings in a few words."""
    joint = found.joint
    if joint is None or not joint.adopted:
        return str(found.chosen)
    pinned = "pinned" if joint.pin_memory else "not pinned"
    return f"{joint.num_workers}, prefetch {joint.prefetch_factor}, {pinned}"


def workers_lines(found: WorkersEvidence) -> Iterator[str]:
    """Yield the lines under the table."""
    ceiling = statistics.median(found.cached_padded_tokens_per_s)
    yield f"ceiling, the same step on batches from memory: {format_count(ceiling)} slot tokens/s"
    ranks = f"{plural(found.local_ranks, 'rank')}{' together' * (found.local_ranks > 1)}"
    yield f"consumer: {found.consumer}; {ranks}, {found.windows} windows of at least {found.window_s:g} s"
    yield f"tried up to {found.max_workers} workers: {found.max_workers_because}"
    place = "" if found.data_filesystem is None else f"on {found.data_filesystem}, "
    rates = [row.storage_bytes_per_s for row in found.rows if row.storage_bytes_per_s is not None]
    most = max(rates, default=None)
    storage = "what" if most is None else f"up to {per_s(most)}" if most else "nothing"
    yield f"dataset: {place}{storage} came from storage{' cannot be read here' if most is None else ''}"
    yield f"GPU: {found.gpu_source}"
    if any(row.gpu for row in found.rows):
        yield "utilisation says how long a kernel was running; it is not MFU, which says how much of the peak it used"
    if found.operating_state:
        yield f"GPU's operating state: {found.operating_state}"
    best = max(row.ratio_to_cached for row in found.rows)
    if found.data_on_network:
        yield (
            f"the data lies on a network file system ({found.data_filesystem}), which others use too; a copy on this "
            f"node's disk could win {max(0.0, 1 / best - 1):.1%} at most: autotune data stage DIR --to LOCAL"
        )
    highs = [row.ratio_high for row in found.rows if row.ratio_high is not None]
    adopted = found.joint is not None and found.joint.adopted
    if highs and max(highs) < ENOUGH_SHARE and not (found.keeps_up or adopted):
        yield (
            f"no count feeds the step: {1 - best:.0%} of what it could do is lost to data; more CPUs for each rank, "
            "faster storage or shorter samples would help"
        )
    if found.joint:
        joint = found.joint
        ratio = of_windows(joint.ratio, "{:.1%}".format)
        yield (
            f"{joint.trials} trials of workers, prefetching and pinning together led to "
            f"{joint.num_workers} workers, prefetch {joint.prefetch_factor}, pinning "
            f"{'on' if joint.pin_memory else 'off'}: {ratio} of workers alone, "
            f"{'adopted' if joint.adopted else 'not proven to be faster'}"
        )
