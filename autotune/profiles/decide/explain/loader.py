"""Explanation of a DataLoader setting by the worker sweep. Pure."""

from autotune.advice.values import EvidenceFigure, figure
from autotune.base.units import format_share
from autotune.base.wording import plural
from autotune.profiles.decide.explain.explanation import Explanation
from autotune.profiles.values import Profile
from autotune.workers.values import VERDICT_WORDS, WorkersEvidence, WorkersRow
from trainer.config.train_config import DataSettings, Tag, tagged

_SEARCHED_KEYS = [f"data.{name}" for name in tagged(DataSettings, Tag.LOADER)]
"""Settings that the joint search of a sweep varies together."""


def is_decided_by_sweep(workers: WorkersEvidence, key: str) -> bool:
    """Return whether a worker sweep decided a setting, alone or by its joint search."""
    if key == "data.num_workers":
        return True
    joint = workers.joint
    return joint is not None and joint.adopted and key in _SEARCHED_KEYS


def explain_loader(profile: Profile, workers: WorkersEvidence, key: str) -> Explanation:
    """Explain a loader setting by the worker sweep and its joint search.

    Args:
        profile: Profile with the setting.
        workers: Evidence of the sweep.
        key: Dotted name of the setting, in ``data``.
    """
    name = key.removeprefix("data.")
    figures = []
    rejected = []
    for row in workers.rows:
        if row.num_workers == workers.chosen:
            figures.append(_figure_of_count(row))
        else:
            rejected.append(_rejected_count(row))
    if workers.next_smaller:
        rejected.append(workers.next_smaller)
    expected = workers.chosen
    because = workers.choice
    joint = workers.joint
    if joint is not None and joint.adopted:
        expected = getattr(joint, name)
        because = (
            "found to be faster by a joint search over workers, prefetch and pinning"
        )
        figures.append(
            figure(
                "relative to tuning workers alone",
                joint.ratio,
                "ratio",
                "evidence.workers.joint",
                n=joint.trials,
            )
        )
    # Settings may have been edited since the sweep.
    is_kept = getattr(profile.train.data, name) == expected
    if not is_kept:
        because = f"{expected} was measured to be the best choice: {because}"
    return Explanation(
        origin="measured" if is_kept else "changed",
        evidence=tuple(figures),
        rejected=tuple(rejected),
        because=because,
    )


def _figure_of_count(row: WorkersRow) -> EvidenceFigure:
    """Return the throughput with a number of workers, relative to cached batches."""
    return figure(
        f"throughput relative to cached batches, {plural(row.num_workers, 'worker')}",
        row.ratio,
        "share",
        "evidence.workers.rows",
        n=len(row.padded_tokens_per_s),
    )


def _rejected_count(row: WorkersRow) -> str:
    """Return the result of a number of workers that was not chosen, in words."""
    return (
        f"{plural(row.num_workers, 'worker')}: {format_share(row.ratio_to_cached)} of"
        f" the throughput on cached batches, {VERDICT_WORDS[row.verdict]}"
    )
