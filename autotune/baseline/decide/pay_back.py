"""What a tuning cost, and when that is paid back. Pure arithmetic on trials and on the comparison with the default."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.baseline.values import BaselineEvidence, row_of
from autotune.trials.values import FinishedTrial

LARGE_JOB_RANKS = 256
"""As many as the project's target cluster gives a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """All trials of one kind."""

    job: str
    trials: int
    seconds: float
    rank_seconds: float
    """Times the ranks that each kept busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayBack:
    """After how much training a tuning has paid for itself, in hours of one rank; any number of ranks shares them."""

    rank_hours: float | None
    """None where the tuned settings are not faster."""
    rank_hours_low: float | None
    rank_hours_high: float | None
    """From the interval of the ratio; None where the tuned settings may not be faster at all."""


def cost_rows(trials: Sequence[FinishedTrial]) -> tuple[CostRow, ...]:
    """By kind of trial, the most expensive first."""
    by_job: dict[str, list[FinishedTrial]] = {}
    for done in trials:
        by_job.setdefault(done.trial.job, []).append(done)
    rows = []
    for job, some in by_job.items():
        rank_seconds = sum(done.seconds * done.trial.ranks for done in some)
        seconds = sum(done.seconds for done in some)
        rows.append(CostRow(job=job, trials=len(some), seconds=seconds, rank_seconds=rank_seconds))
    return tuple(sorted(rows, key=lambda row: -row.rank_seconds))


def pay_back(cost_rank_s: float, baseline: BaselineEvidence | None) -> PayBack | None:
    """Against transformers' Trainer with its defaults; None where nobody compared."""
    row = row_of(baseline, "hf-trainer")
    if row is None or row.speedup is None:
        return None
    # While the tuned settings train for an hour, that would take ``speedup`` hours: the difference is what is saved.
    speedups = (row.speedup, row.speedup_high, row.speedup_low)
    value, low, high = (
        None if speedup is None or speedup <= 1 else cost_rank_s / 3600 / (speedup - 1) for speedup in speedups
    )
    return PayBack(rank_hours=value, rank_hours_low=low, rank_hours_high=high)
