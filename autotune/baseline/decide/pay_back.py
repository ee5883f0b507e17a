"""Cost of a tuning, and the training time that pays it back.

Everything here is pure arithmetic on trials and the baseline comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.baseline.values import BaselineEvidence, row_of
from autotune.trials.values import FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """Cost of all trials of one kind."""

    job: str
    trials: int
    seconds: float
    rank_seconds: float
    """Sum of each trial's seconds times its busy ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayBack:
    """Training time after which tuning pays for itself, in hours of one rank.

    Divide it by the number of ranks to get hours of training.
    """

    rank_hours: float | None
    """Hours of one rank; None if the tuned settings are not faster."""
    rank_hours_low: float | None
    rank_hours_high: float | None
    """Bound from the interval of the speedup; None if the tuned settings may not be
    faster."""


def cost_rows(trials: Sequence[FinishedTrial]) -> tuple[CostRow, ...]:
    """Return the cost by kind of trial, the most expensive first."""
    rows = []
    for job in dict.fromkeys(done.trial.job for done in trials):
        some = [done for done in trials if done.trial.job == job]
        rank_seconds = sum(done.seconds * done.trial.ranks for done in some)
        seconds = sum(done.seconds for done in some)
        rows.append(
            CostRow(
                job=job, trials=len(some), seconds=seconds, rank_seconds=rank_seconds
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.rank_seconds))


def pay_back(cost_rank_s: float, baseline: BaselineEvidence | None) -> PayBack | None:
    """Return the training time after which tuning pays for itself.

    The reference is transformers' Trainer.

    Returns:
        The training time, or None if the two were not compared.
    """
    row = row_of(baseline, "hf-trainer")
    if row is None or row.speedup is None:
        return None
    # An hour of tuned training replaces ``speedup`` hours, so it saves the difference.
    speedups = (row.speedup, row.speedup_high, row.speedup_low)
    value, low, high = (
        None if one is None or one <= 1 else cost_rank_s / 3600 / (one - 1)
        for one in speedups
    )
    return PayBack(rank_hours=value, rank_hours_low=low, rank_hours_high=high)
