"""What a worker sweep found, as text."""

import statistics
from collections.abc import Iterator
from pathlib import Path

from autotune.core.evidence import WorkersEvidence, WorkersRow
from autotune.core.units import format_bytes, format_count, format_share
from autotune.decide.workers import ENOUGH_SHARE
from autotune.show.intervals import of_windows, window_bounds
from autotune.show.tables import text_table

HEADERS = (
    "loader workers", "slot tokens/s (median)", "of the ceiling", "98 % interval", "data wait", "GPU utilisation",
    "RAM", "verdict",
)  # fmt: skip
ALIGN = "rrrrrrrl"
VERDICTS = {"proven": "enough", "refuted": "too few", "open": "undecided"}
GPU_HEADERS = (
    "loader workers",
    "SMs busy",
    "occupancy",
    "tensor",
    "DRAM",
    "PCIe in",
    "power",
    "SM clock",
    "at the cap",
)
GPU_ALIGN = "rrrrrrrrr"


def workers_text(found: WorkersEvidence, profile: Path, data: Path) -> str:
    """The answer for people, and what to run next."""
    chosen = chosen_loader(found)
    return "\n".join(
        [
            text_table(HEADERS, [workers_cells(row) for row in found.rows], align=ALIGN),
            *gpu_table(found),
            *workers_lines(found),
            "",
            f"loader workers: {chosen} ({found.choice})",
            *([found.refusal] if found.refusal else []),
            f"profile: {profile}",
            f"next: torchrun --nproc-per-node {found.local_ranks} -m trainer --profile {profile} --data {data}",
        ]
    )


def chosen_loader(found: WorkersEvidence) -> str:
    """The answer in a few words."""
    joint = found.joint
    if joint is None or not joint.adopted:
        return str(found.chosen)
    pinned = "pinned" if joint.pin_memory else "not pinned"
    return f"{joint.loader_workers}, prefetch {joint.prefetch_batches}, {pinned}"


def workers_lines(found: WorkersEvidence) -> Iterator[str]:
    """What belongs under the table, a line each."""
    ceiling = statistics.median(found.ceiling_slot_tokens_per_s)
    yield f"ceiling, the same step on batches from memory: {format_count(ceiling)} slot tokens/s"
    ranks = "1 rank" if found.local_ranks == 1 else f"{found.local_ranks} ranks together"
    yield f"consumer: {found.consumer}; {ranks}, {found.windows} windows of at least {found.window_s:g} s"
    yield f"tried up to {found.max_workers} workers: {found.max_workers_because}"
    place = "" if found.data_filesystem is None else f"on {found.data_filesystem}, "
    yield f"dataset: {place}{_storage(found)}"
    yield f"GPU: {found.gpu_source}"
    if found.operating_state:
        yield f"GPU's operating state: {found.operating_state}"
    if found.data_on_network:
        best = max(row.ratio_to_ceiling for row in found.rows)
        yield (
            f"the data lies on a network file system ({found.data_filesystem}), which others use too; a copy on this "
            f"node's disk could win {max(0.0, 1 / best - 1):.1%} at most: autotune data stage DIR --to LOCAL"
        )
    best_high = max((row.ratio_high for row in found.rows if row.ratio_high is not None), default=None)
    if (
        not found.fed
        and best_high is not None
        and best_high < ENOUGH_SHARE
        and not (found.joint and found.joint.adopted)
    ):
        best = max(row.ratio_to_ceiling for row in found.rows)
        yield (
            f"no count feeds the step: {1 - best:.0%} of what it could do is lost to data; more CPUs for each rank, "
            "faster storage or shorter samples would help"
        )
    if found.joint:
        joint = found.joint
        ratio = of_windows(joint.ratio, "{:.1%}".format)
        yield (
            f"{joint.trials} trials of workers, prefetching and pinning together led to "
            f"{joint.loader_workers} workers, prefetch {joint.prefetch_batches}, pinning "
            f"{'on' if joint.pin_memory else 'off'}: {ratio} of workers alone, "
            f"{'adopted' if joint.adopted else 'not proven to be faster'}"
        )


def gpu_table(found: WorkersEvidence) -> Iterator[str]:
    """What the counters said, where there are any."""
    rows = gpu_rows(found)
    if rows:
        yield text_table(GPU_HEADERS, rows, align=GPU_ALIGN)


def gpu_rows(found: WorkersEvidence) -> list[list[str | None]]:
    """Hardware counters and state by count; empty without a GPU."""
    return [
        [
            str(row.loader_workers),
            format_share(row.gpu.gpm_sm_share),
            format_share(row.gpu.gpm_occupancy_share),
            format_share(row.gpu.gpm_tensor_share),
            format_share(row.gpu.gpm_dram_share),
            _per_s(row.gpu.gpm_pcie_rx_bytes_per_s),
            None if row.gpu.power_w is None else f"{row.gpu.power_w:.0f} W",
            None if row.gpu.sm_clock_mhz is None else f"{row.gpu.sm_clock_mhz:.0f} MHz",
            format_share(row.gpu.power_capped_share),
        ]
        for row in found.rows
        if row.gpu is not None
    ]


def workers_cells(row: WorkersRow) -> list[str | None]:
    """One row of the sweep's table."""
    return [
        str(row.loader_workers),
        format_count(statistics.median(row.slot_tokens_per_s)),
        f"{row.ratio_to_ceiling:.3f}",
        window_bounds(row.ratio, "{:.3f}".format),
        format_share(row.data_wait_share),
        format_share(None if row.gpu is None else row.gpu.utilisation_share),
        format_bytes(row.memory_bytes),
        VERDICTS[row.verdict],
    ]


def _storage(found: WorkersEvidence) -> str:
    rates = [row.storage_bytes_per_s for row in found.rows if row.storage_bytes_per_s is not None]
    if not rates:
        return "what came from storage cannot be read here"
    return f"{f'up to {_per_s(max(rates))}' if max(rates) else 'nothing'} came from storage"


def _per_s(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"
