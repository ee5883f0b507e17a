"""Explanation of a setting of the DataLoader by the worker sweep. Pure."""

from collections.abc import Iterator

from autotune.base.units import format_share
from autotune.base.wording import plural
from autotune.evidence.advice import EvidenceFigure, figure
from autotune.evidence.profile import Profile
from autotune.evidence.workers import JointChoice, WorkersEvidence, WorkersRow
from autotune.profiles.decide.explain.explanation import Explanation, Origin


def is_decided_by_sweep(workers: WorkersEvidence, key: str) -> bool:
    """Return whether a worker sweep decided a setting, alone or by its joint search."""
    if key == "data.num_workers":
        return True
    joint = workers.joint
    if joint is None or not joint.adopted:
        return False
    return key.removeprefix("data.") in joint.settings


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
        share_of_cached(row)
        for row in workers.rows
        if row.num_workers == workers.chosen
    ]
    joint = workers.joint
    if joint is not None and joint.adopted:
        chosen = getattr(joint, name)
        because = (
            "found to be faster by a joint search over workers, prefetch and pinning"
        )
        figures.append(figure_of_search(joint))
    origin: Origin = "measured"
    # Settings may have been edited since the sweep.
    if getattr(profile.train.data, name) != chosen:
        origin = "changed"
        because = f"{chosen} was measured to be the best choice: {because}"
    return Explanation(
        origin=origin,
        evidence=tuple(figures),
        rejected=tuple(rejected_counts(workers)),
        because=because,
    )


def share_of_cached(row: WorkersRow) -> EvidenceFigure:
    """Return the throughput with a number of workers, relative to cached batches."""
    return figure(
        f"throughput relative to cached batches, {plural(row.num_workers, 'worker')}",
        row.ratio,
        "share",
        "evidence.workers.rows",
        n=len(row.units_per_s),
    )


def figure_of_search(joint: JointChoice) -> EvidenceFigure:
    """Return the throughput of a joint search, relative to tuning workers alone."""
    return figure(
        "relative to tuning workers alone",
        joint.ratio,
        "ratio",
        "evidence.workers.joint",
        n=joint.trials,
    )


def rejected_counts(workers: WorkersEvidence) -> Iterator[str]:
    """Yield the results of the numbers of workers that were not chosen, in words."""
    for row in workers.rows:
        if row.num_workers != workers.chosen:
            share = format_share(row.ratio_to_cached)
            yield (
                f"{plural(row.num_workers, 'worker')}: {share} of the throughput on"
                f" cached batches, {row.verdict_words}"
            )
    if workers.next_smaller:
        yield workers.next_smaller
