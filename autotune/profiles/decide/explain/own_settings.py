"""Explanation of each setting of your own code. Pure.

The size and the number of workers were measured; other arguments are yours.
"""

from collections.abc import Iterator
from dataclasses import replace

from autotune.base.units import format_bytes
from autotune.evidence.advice import EvidenceFigure, figure
from autotune.evidence.argument import Argument
from autotune.evidence.probe import ProbeEvidence
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence
from autotune.profiles.decide.explain.explanation import Explanation, Origin
from autotune.profiles.decide.explain.explored import explain_explored
from autotune.profiles.decide.explain.loader import (
    figure_of_search,
    rejected_counts,
    share_of_cached,
)
from autotune.profiles.decide.micro_batch import (
    choose_by_throughput,
    with_headroom,
)


def explain_own_settings(profile: Profile) -> Iterator[Explanation]:
    """Yield each tuned setting of your code, then its fixed arguments."""
    for name, value in profile.settings.items():
        yield _explain(profile, name, value)
    for name, value in profile.subject.arguments.items():
        if name not in profile.settings:
            yield Explanation(
                key=name,
                value=value,
                origin="requested",
                because="an argument that you set; all figures hold only for it",
            )


def _explain(profile: Profile, name: str, value: Argument) -> Explanation:
    """Explain a tuned setting by the evidence that decided it."""
    probe, workers = profile.evidence.probe, profile.evidence.workers
    if probe is not None and name == profile.subject.size:
        return _explain_size(profile, probe, value)
    if workers is not None and name in workers.loader_settings:
        return _explain_loader(workers, name, value)
    explored = explain_explored(profile, name, value)
    if explored is not None:
        return replace(explored, key=name, value=value)
    return Explanation(
        key=name,
        value=value,
        origin="changed",
        because="set by hand; no measurement decides it",
    )


def _explain_size(
    profile: Profile, probe: ProbeEvidence, value: Argument
) -> Explanation:
    """Explain the searched size by the probe of your step."""
    chosen = _chosen_size(profile, probe)
    # Without throughput, memory alone decides.
    origin: Origin = "measured" if probe.curve else profile.fingerprint.bytes_known
    because = probe.choice
    if value != chosen:
        origin = "changed"
        because = f"{chosen} was measured to be the best choice: {probe.choice}"
    rejected = [f"{row.size}: out of memory" for row in probe.sizes if not row.fits]
    return Explanation(
        key=profile.subject.size,
        value=value,
        origin=origin,
        because=because,
        evidence=(
            *_rate_figures(profile, probe, value),
            *_size_figures(profile, probe),
        ),
        rejected=tuple(dict.fromkeys(rejected)),
    )


def _chosen_size(profile: Profile, probe: ProbeEvidence) -> int:
    """Return the size that the search chose, or the probe.

    The probe chooses by throughput if that was measured.
    """
    explore = profile.evidence.explore
    if explore is not None and explore.adopted:
        return int(explore.chosen.settings[profile.subject.size])
    if probe.curve:
        return choose_by_throughput(
            probe.curve, probe.feasible_max, in_words=profile.subject.size_words
        ).micro_batch_size
    largest = probe.feasible_max // probe.multiple_of
    headroom_share = profile.constraints.headroom_share
    return with_headroom(largest, headroom_share) * probe.multiple_of


def _rate_figures(
    profile: Profile, probe: ProbeEvidence, value: Argument
) -> Iterator[EvidenceFigure]:
    """Yield the throughput at a size, if it was measured."""
    subject = profile.subject
    for point in probe.curve:
        if point.size == value:
            yield figure(
                f"{subject.unit}/s at {subject.size_words(point.size)}",
                point.rate,
                "count",
                "evidence.probe.curve",
                n=point.timed_steps,
            )


def _size_figures(profile: Profile, probe: ProbeEvidence) -> Iterator[EvidenceFigure]:
    """Yield the largest size that fits, its peak, and the memory budget."""
    known = profile.fingerprint.bytes_known
    yield figure(
        f"largest {profile.subject.size} that fits",
        probe.feasible_max,
        "count",
        "evidence.probe.feasible_max",
        known=known,
    )
    yield figure(
        "its peak",
        probe.feasible_peak_bytes,
        "bytes",
        "evidence.probe.feasible_peak_bytes",
        known=known,
    )
    budget_bytes = profile.constraints.memory_budget_bytes
    if budget_bytes is not None:
        yield figure(
            "memory budget", budget_bytes, "bytes", "constraints", known="assumed"
        )


def _explain_loader(
    workers: WorkersEvidence, name: str, value: Argument
) -> Explanation:
    """Explain a setting of the loader by the sweep of its workers."""
    chosen = workers.loader_settings[name]
    because = workers.choice
    figures = [
        share_of_cached(row)
        for row in workers.rows
        if row.num_workers == workers.chosen
    ]
    joint = workers.joint
    if joint is not None and joint.adopted:
        because = (
            "found to be faster by a joint search over workers, prefetch and pinning"
        )
        figures.append(figure_of_search(joint))
    if value != chosen:
        because = f"{chosen} was measured to be the best choice: {because}"
    worker = []
    if workers.worker_bytes is not None:
        held = format_bytes(workers.worker_bytes)
        worker.append(f"more workers: each holds {held} of private memory")
    return Explanation(
        key=name,
        value=value,
        origin="measured" if value == chosen else "changed",
        because=because,
        evidence=tuple(figures),
        rejected=(*rejected_counts(workers), *worker),
    )
