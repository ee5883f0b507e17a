"""Contradictions between GPU utilisation and throughput. Pure.

Throughput decides the number of workers. NVML's utilisation is the share of the time in
which any kernel runs: a GPU may be idle although data loading keeps up, and it may be
always busy although data loading slows the step down.
"""

from autotune.base.units import format_percent
from autotune.evidence.workers import UtilisationFinding, WorkersRow
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE

IDLE_SHARE = 0.9
"""GPU utilisation below which a GPU counts as idle."""
ALWAYS_BUSY_SHARE = 0.99
"""GPU utilisation from which on a GPU counts as always busy."""
LEAST_EXPLAINED_SHARE = 0.5
"""Least share of the lost throughput that the wait for data explains, for which data
loading is named as its reason."""


def utilisation_finding(
    row: WorkersRow, *, keeps_up: bool, cached_utilisation_share: float | None
) -> UtilisationFinding | None:
    """Return a contradiction between utilisation and throughput.

    Args:
        row: Result of the chosen number of workers.
        keeps_up: True if it reaches the upper bound, the step on cached batches.
        cached_utilisation_share: GPU utilisation on cached batches; None if it is
            unknown.

    Returns:
        The contradiction; None if there is none, or without a GPU.
    """
    if row.gpu is None or row.gpu.utilisation_share is None:
        return None
    busy_share = row.gpu.utilisation_share
    if keeps_up and busy_share < IDLE_SHARE:
        return _idle(row.num_workers, busy_share, cached_utilisation_share)
    is_below = row.ratio_high is not None and row.ratio_high < ENOUGH_SHARE
    if is_below and busy_share >= ALWAYS_BUSY_SHARE:
        return _busy(row, busy_share)
    return None


def _idle(
    num_workers: int, busy_share: float, cached_share: float | None
) -> UtilisationFinding:
    cached = ""
    if cached_share is not None:
        cached = f" ({format_percent(cached_share)} on cached batches)"
    return UtilisationFinding(
        kind="idle at the upper bound",
        utilisation_share=busy_share,
        claim=(
            f"the GPU is busy only {format_percent(busy_share)} of the time{cached},"
            f" although num_workers={num_workers} reaches the upper bound: it waits for"
            " the step's own work on the CPU, such as kernel launches, and not for data"
        ),
        next_step="a larger micro-batch or compile: autotune advise lists what applies",
    )


def _busy(row: WorkersRow, busy_share: float) -> UtilisationFinding:
    claim = (
        f"the GPU is busy {format_percent(busy_share)} of the time, although"
        f" num_workers={row.num_workers} reaches only"
        f" {format_percent(row.ratio_to_cached)} of the upper bound:"
    )
    lost_share = 1 - row.ratio_to_cached
    if row.data_wait_share >= LEAST_EXPLAINED_SHARE * lost_share:
        claim += (
            f" it waits for data {format_percent(row.data_wait_share)} of the time,"
            " which utilisation hides: a kernel that waits, as in an all-reduce, counts"
        )
        next_step = "faster data loading: autotune advise lists what applies"
    else:
        claim += (
            " it hardly waits for data, so its kernels are slower than on cached"
            " batches, as with lower clocks or copies from unpinned memory"
        )
        next_step = "see what slows the GPU down: autotune doctor"
    return UtilisationFinding(
        kind="busy below the upper bound",
        utilisation_share=busy_share,
        claim=claim,
        next_step=next_step,
    )
