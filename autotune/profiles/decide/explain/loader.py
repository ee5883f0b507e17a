"""Explanation of a setting of the DataLoader by the worker sweep. Pure."""

from collections.abc import Iterable, Iterator

from autotune.base.units import format_share
from autotune.base.wording import plural
from autotune.evidence.advice import EvidenceFigure, figure
from autotune.evidence.profile import Profile
from autotune.evidence.workers import (
    CountEvidence,
    CountRow,
    JointChoice,
    WorkersEvidence,
)
from autotune.profiles.decide.explain.explanation import Explanation, Origin
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
    """Explain a setting of the DataLoader by the worker sweep and its joint search.

    Args:
        profile: Profile with the setting.
        workers: Evidence of the sweep.
        key: Dotted name of the setting, in ``data``, that the sweep decided.
    """
    # Both the profile's ``data`` and the joint search name the setting like this.
    name = key.removeprefix("data.")
    chosen: object = workers.chosen
    because = workers.choice
    figures = [
        share_of_cached(row, len(row.padded_tokens_per_s), "evidence.workers.rows")
        for row in workers.rows
        if row.num_workers == workers.chosen
    ]
    joint = workers.joint
    if joint is not None and joint.adopted:
        chosen = getattr(joint, name)
        because = (
            "found to be faster by a joint search over workers, prefetch and pinning"
        )
        figures.append(_figure_of_search(joint))
    origin: Origin = "measured"
    # Settings may have been edited since the sweep.
    if getattr(profile.train.data, name) != chosen:
        origin = "changed"
        because = f"{chosen} was measured to be the best choice: {because}"
    return Explanation(
        origin=origin,
        evidence=tuple(figures),
        rejected=tuple(rejected_counts(workers, workers.rows)),
        because=because,
    )


def share_of_cached(row: CountRow, windows: int, source: str) -> EvidenceFigure:
    """Return the throughput with a number of workers, relative to cached batches.

    Args:
        row: Result with this number of workers.
        windows: Number of its windows.
        source: Key of the evidence.
    """
    return figure(
        f"throughput relative to cached batches, {plural(row.num_workers, 'worker')}",
        row.ratio,
        "share",
        source,
        n=windows,
    )


def _figure_of_search(joint: JointChoice) -> EvidenceFigure:
    """Return the throughput of a joint search, relative to tuning workers alone."""
    return figure(
        "relative to tuning workers alone",
        joint.ratio,
        "ratio",
        "evidence.workers.joint",
        n=joint.trials,
    )


def rejected_counts(workers: CountEvidence, rows: Iterable[CountRow]) -> Iterator[str]:
    """Yield the results of the numbers of workers that were not chosen, in words.

    Args:
        workers: Evidence of the sweep.
        rows: Its results by number of workers.
    """
    for row in rows:
        if row.num_workers != workers.chosen:
            share = format_share(row.ratio_to_cached)
            yield (
                f"{plural(row.num_workers, 'worker')}: {share} of the throughput on"
                f" cached batches, {row.verdict_words}"
            )
    if workers.next_smaller:
        yield workers.next_smaller
