"""Cost of a tuning, and the training time that pays it back.

Everything here is pure arithmetic on trials and the baseline comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.evidence.baseline import UNTUNED, BaselineEvidence, row_of
from autotune.trials.values import FinishedTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """Cost of all trials of one kind."""

    job: str
    """Kind of trial."""
    trials: int
    """Number of trials."""
    seconds: float
    """Sum of the trials' seconds."""
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
    """Hours if the speedup is at its upper bound; None without one above 1."""
    rank_hours_high: float | None
    """Hours if the speedup is at its lower bound; None without one above 1: the tuned
    settings may not be faster then."""


def cost_rows(trials: Sequence[FinishedTrial]) -> tuple[CostRow, ...]:
    """Return the cost by kind of trial, the most expensive first.

    Args:
        trials: Finished trials of a tuning.
    """
    trials_by_job: dict[str, list[FinishedTrial]] = {}
    for finished in trials:
        trials_by_job.setdefault(finished.trial.job, []).append(finished)
    rows = [
        CostRow(
            job=job,
            trials=len(job_trials),
            seconds=sum(finished.seconds for finished in job_trials),
            rank_seconds=sum(
                finished.seconds * finished.trial.ranks for finished in job_trials
            ),
        )
        for job, job_trials in trials_by_job.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.rank_seconds))


def pay_back(cost_rank_s: float, baseline: BaselineEvidence | None) -> PayBack | None:
    """Return the training time after which tuning pays for itself.

    The tuned settings are compared with untuned ones.

    Args:
        cost_rank_s: Cost of the tuning, in seconds of one rank.
        baseline: Speedups of the tuned settings; None if they were not measured.

    Returns:
        The training time; None if there is no speedup over untuned settings.
    """
    row = row_of(baseline, UNTUNED)
    if row is None or row.speedup is None:
        return None
    # The highest speedup pays back soonest.
    return PayBack(
        rank_hours=_pay_back_hours(cost_rank_s, row.speedup),
        rank_hours_low=_pay_back_hours(cost_rank_s, row.speedup_high),
        rank_hours_high=_pay_back_hours(cost_rank_s, row.speedup_low),
    )


def _pay_back_hours(cost_rank_s: float, speedup: float | None) -> float | None:
    """Return the hours that pay back a cost; None without a speedup above 1."""
    if speedup is None or speedup <= 1:
        return None
    # An hour of tuned training replaces ``speedup`` hours, so it saves the difference.
    return cost_rank_s / 3600 / (speedup - 1)
