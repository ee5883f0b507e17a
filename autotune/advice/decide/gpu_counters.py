"""Gaps between kernels and waits for memory during compute, from GPU counters. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.evidence.advice import Cause, StepPart
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersRow

HEALTHY_BUSY_SHARE = 0.9
"""Share of busy SMs in a step without delays: waves of thread blocks end unevenly."""
PRODUCT_REACH = 0.7
"""Assumed share of matmul time in which Tensor Cores are busy; the rest fills and
drains them."""
PRODUCT_TRAFFIC = 0.25
"""Assumed share of the memory bandwidth that matmuls use."""
MOVING_REACH = 0.85
"""Assumed share of the memory bandwidth that memory-bound kernels use, such as those of
the optimizer step."""
TENSOR_SHARE = 0.005
"""Least share of busy Tensor Cores at which matmuls run on them; otherwise their
counter does not measure compute."""
IN_WINDOWS = "windows with num_workers="
"""Words in the source of a part that was measured in the windows of a sweep."""
LEAST_COMPUTING_SHARE = 0.05
"""Lower bound for the share of compute in a window, because estimates from less are not
reliable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """GPU counters while the GPUs had data, as shares of that time, 0 to 1."""

    busy_share: float
    tensor_share: float | None = None
    memory_share: float | None = None
    source: str


def data_share(row: WorkersRow) -> float:
    """Return the share of a window's time that data loading costs.

    The window is compared with one on cached batches.
    """
    lost = max(0.0, 1 - row.ratio_to_cached)
    # Slower without waits by chance.
    return lost if row.data_wait_share >= 0.01 else min(lost, row.data_wait_share)


def counters_of(row: WorkersRow) -> Counters | None:
    """Return counters while the GPUs had data, at one worker count.

    Returns:
        The counters, or None if the GPU has none.
    """
    gpu, keeps_up = row.gpu, 1 - data_share(row)
    if gpu is None or gpu.gpm_sm_share is None or keeps_up <= 0:
        return None

    def when_fed(share: float | None) -> float | None:
        return None if share is None else min(1.0, share / keeps_up)

    tensor_share = when_fed(gpu.gpm_tensor_share)
    if tensor_share is not None and tensor_share < TENSOR_SHARE:
        tensor_share = None
    return Counters(
        busy_share=min(1.0, gpu.gpm_sm_share / keeps_up),
        tensor_share=tensor_share,
        memory_share=when_fed(gpu.gpm_dram_share),
        source=f"hardware counters, {IN_WINDOWS}{row.num_workers}",
    )


def idle_part(row: WorkersRow) -> StepPart | None:
    """Return the part of a step in which the GPUs had data and ran no kernel.

    It is for GPUs without hardware counters. Utilisation by NVML counts a GPU as busy
    while any kernel runs, so short gaps are not seen and this is a lower bound.

    Returns:
        The part; None if utilisation was not measured.
    """
    if row.gpu is None or row.gpu.utilisation_share is None:
        return None
    idle = max(0.0, 1 - data_share(row) - row.gpu.utilisation_share)
    return StepPart(
        cause="launch-bound",
        share=idle,
        source=f"GPU utilisation (NVML), {IN_WINDOWS}{row.num_workers}",
    )


def counters_of_profile(profile: Profile) -> Counters | None:
    """Return the counters at the chosen number of DataLoader workers.

    Returns:
        The counters, or None if there are none.
    """
    workers = profile.evidence.workers
    rows = (
        []
        if workers is None
        else [row for row in workers.rows if row.num_workers == workers.chosen]
    )
    return counters_of(rows[0]) if rows else None


def with_counters(
    parts: Sequence[StepPart], counters: Counters, uneven: float = 0.0
) -> tuple[list[StepPart], float]:
    """Refine the parts of a step by counters.

    SMs without work wait for launches unless they wait for data or another rank.

    Args:
        parts: The parts without counters.
        counters: Hardware counters of the same steps.
        uneven: Share of waits for a slowest rank that changes although sequences are
            equal, which is a sign of late launches and not of a slow GPU.

    Returns:
        The refined parts, and the share of the step that waits for launches.
    """
    found = {one.cause: one for one in parts}
    gaps, moving = _inside(found, counters)
    computing = max(0.0, 1 - sum(one.share for one in parts if one.cause != "padding"))
    waiting = computing * gaps + uneven
    before = found["launch-bound"].share if "launch-bound" in found else 0.0
    found["launch-bound"] = StepPart(
        cause="launch-bound", share=waiting + before, source=counters.source
    )
    computing *= 1 - gaps
    if "padding" in found:
        found["padding"] = found["padding"].scaled(1 - gaps)
    for cause in ("straggler", "network"):
        if cause in found and (taken := min(uneven, found[cause].share)):
            found[cause] = found[cause].scaled(1 - taken / found[cause].share)
            uneven -= taken
    if moving is not None:
        waits = computing * moving
        padding = found.get("padding")
        if padding is not None and waits >= padding.share:
            # Memory traffic for padding counts once, in the larger of the two.
            found["padding"] = padding.scaled(1 - moving)
        elif padding is not None:
            waits -= padding.share * moving
        found["memory"] = StepPart(cause="memory", share=waits, source=counters.source)
    return list(found.values()), waiting


def _inside(
    found: dict[Cause, StepPart], counters: Counters
) -> tuple[float, float | None]:
    """Split compute into kernels, time without work, and waits for memory.

    Waits and optimizer steps are subtracted from the counters first.

    Returns:
        The share of compute without work on the GPU, and the share of the rest that
        waits for memory, if known. The latter is the mean of an upper estimate, the
        time outside matmuls, and a lower one, the memory traffic outside matmuls.
    """

    def part(*causes: Cause) -> float:
        return sum(found[cause].share for cause in causes if cause in found)

    keeps_up = max(LEAST_COMPUTING_SHARE, 1 - part("data loading", "launch-bound"))
    updating = part("optimizer step") / keeps_up
    computing = max(
        LEAST_COMPUTING_SHARE, 1 - part("straggler", "network") / keeps_up - updating
    )
    busy = min(1.0, max(0.0, counters.busy_share - updating) / computing)
    gaps = max(0.0, HEALTHY_BUSY_SHARE - busy) / HEALTHY_BUSY_SHARE
    if counters.memory_share is None or counters.tensor_share is None:
        return gaps, None
    running = max(LEAST_COMPUTING_SHARE, computing * (1 - gaps))
    matmuls = min(1.0, counters.tensor_share / running / PRODUCT_REACH)
    traffic = max(0.0, counters.memory_share - MOVING_REACH * updating) / running
    beyond = max(0.0, traffic - PRODUCT_TRAFFIC * matmuls) / MOVING_REACH
    return gaps, min(1.0, (1 - matmuls + beyond) / 2)
