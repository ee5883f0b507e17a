"""Limits of data loading that a sweep shows: too few workers, or the loader. Pure."""

from autotune.evidence.workers import WorkersEvidence
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE
from autotune.workers.decide.gpu_utilisation import LEAST_EXPLAINED_SHARE

LIMITED_BY_LOADER = 1.05
"""Gain of the most workers over half as many, below which more of them would not help
either."""


def idle_counts(evidence: WorkersEvidence) -> list[int]:
    """Return the numbers of workers of which the loader started fewer."""
    return [
        row.num_workers
        for row in evidence.rows
        if row.processes is not None and row.processes < row.num_workers
    ]


def is_short_of_data(evidence: WorkersEvidence) -> bool:
    """Return True if no loader settings are sufficient, by the upper bounds.

    A count of too few rounds for a bound is taken to be at most a little faster than
    the best. If the GPUs wait much less than the ratios say, these have another reason.
    """
    if evidence.keeps_up or (evidence.joint and evidence.joint.adopted):
        return False
    best_ratio = max(row.ratio_to_cached for row in evidence.rows)
    upper_bounds = [
        row.ratio_high or LIMITED_BY_LOADER * best_ratio for row in evidence.rows
    ]
    if max(upper_bounds) >= ENOUGH_SHARE:
        return False
    least_wait_share = min(row.data_wait_share for row in evidence.rows)
    return least_wait_share >= LEAST_EXPLAINED_SHARE * (1 - best_ratio)


def grows_with_workers(evidence: WorkersEvidence) -> bool:
    """Return True if the most workers are faster than half as many.

    More of them may then help.
    """
    if idle_counts(evidence):
        return False
    most = max(evidence.rows, key=lambda row: row.num_workers)
    ratios_of_half = [
        row.ratio_to_cached
        for row in evidence.rows
        if row.num_workers <= most.num_workers / 2
    ]
    # A single row shows no limit of the loader.
    if not ratios_of_half or most.num_workers == 0:
        return True
    return most.ratio_to_cached > LIMITED_BY_LOADER * max(ratios_of_half)
