"""A profile as a side of a comparison: of the bundled trainer, or of code of yours."""

from collections.abc import Iterator
from typing import Any

from autotune.base.estimates import estimate_single
from autotune.base.window_statistics import estimate_from_bounds, estimate_windows
from autotune.compare import decide
from autotune.compare.decide import Circumstance, Measurement, Metric, Side
from autotune.compare.side_words import (
    READ_FROM,
    allocator_mark,
    counted,
)
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.values import NOTHING_TIMED
from autotune.profiles.decide.rates import Rate, positive_figures, training_rates
from autotune.profiles.store import StoredProfile
from trainer.formats.nested_tables import flatten_table


def profile_side(stored: StoredProfile, name: str) -> Side:
    """Return the settings and measurements of a profile."""
    notes = []
    if not stored.intact:
        notes.append(
            "the profile was edited by hand: its figures are those of the settings"
            " before"
        )
    if not stored.profile.fingerprint.gpu.takes_time:
        notes.append(NOTHING_TIMED)
    side_of = _trainer_side if stored.profile.has_train else _own_side
    return side_of(stored.profile, name, tuple(notes))


def _trainer_side(profile: Profile, name: str, notes: tuple[str, ...]) -> Side:
    """Return the side of a profile of the bundled trainer."""
    train = profile.train
    circumstances: dict[Circumstance, str] = {
        "model": profile.fingerprint.model_sha256,
        "dataset": profile.fingerprint.dataset_hash,
        "global batch": f"{train.global_batch_size} sequences",
        "row length": str(train.seq_length_tokens),
        "layout": train.layout,
        **_machine(profile),
    }
    ranks = _measured_ranks(profile)
    if ranks is not None:
        circumstances["ranks"] = str(ranks)
    constraints = profile.model_dump(mode="json", include={"constraints"})
    return Side(
        kind="profile",
        name=name,
        circumstances=circumstances,
        settings=flatten_table(train.model_dump(mode="json") | constraints),
        common_settings=_common_settings(profile),
        facts=_facts(profile),
        measurements=tuple(_trainer_figures(profile)),
        headlines=tuple(_headlines(profile)),
        notes=notes,
    )


def _own_side(profile: Profile, name: str, notes: tuple[str, ...]) -> Side:
    """Return the side of a profile of your own code.

    Its source is a fact and no circumstance: two versions of one step are what you want
    to compare.
    """
    subject = profile.subject
    function = subject.function("step") or subject.function("loader") or subject.words
    circumstances: dict[Circumstance, str] = {"model": function, **_machine(profile)}
    constraints = profile.constraints.model_dump(mode="json", exclude_none=True)
    return Side(
        kind="profile",
        name=name,
        circumstances=circumstances,
        settings={
            **flatten_table({"arguments": subject.arguments}),
            **flatten_table({"settings": profile.settings}),
            **flatten_table({"constraints": constraints}),
        },
        common_settings=_common_settings(profile),
        facts=_facts(profile),
        measurements=tuple(_own_figures(profile)),
        headlines=tuple(_headlines(profile)),
        notes=notes,
    )


def _machine(profile: Profile) -> dict[Circumstance, str]:
    """Return the circumstances that profiles of all code have."""
    fingerprint = profile.fingerprint
    cpu_model = fingerprint.cpu_model or "n/a"
    machine: dict[Circumstance, str] = {
        "machine": fingerprint.gpu_name or "cpu",
        "processors": f"{fingerprint.allotted_cpus} of {cpu_model}",
    }
    if profile.constraints.memory_budget_bytes is not None:
        machine["memory budget"] = str(profile.constraints.memory_budget_bytes)
    return machine


def _common_settings(profile: Profile) -> dict[str, Any]:
    """Return the settings that profiles of every subject have, by the same names."""
    constraints = profile.constraints.model_dump(mode="json", exclude_none=True)
    return {
        "subject.kind": profile.subject.kind,
        profile.subject.size: profile.size,
        "num_workers": profile.num_workers,
        **flatten_table({"constraints": constraints}),
    }


def _facts(profile: Profile) -> dict[str, Any]:
    """Return the hashes of your sources, the fingerprint, and the tool's version."""
    sources = {
        f"source of the {role}": sha256
        for role, sha256 in profile.subject.sources.items()
    }
    # These two are circumstances.
    fingerprint = profile.fingerprint.model_dump(
        mode="json", exclude={"model_sha256", "dataset_hash"}
    )
    return {
        **sources,
        **fingerprint,
        "tool_version": profile.provenance.tool_version,
    }


def _measured_ranks(profile: Profile) -> int | None:
    """Return the local ranks of the measurements; None if nothing was measured."""
    if profile.evidence.workers is not None:
        return profile.evidence.workers.local_ranks
    if profile.evidence.probe is not None:
        return profile.evidence.probe.local_ranks
    return None


def _headlines(profile: Profile) -> Iterator[Measurement]:
    """Yield the training speeds, the best known first.

    A loader that nothing but a replayed step consumed has a speed in batches alone.
    """
    metric = decide.TRAINING_RATE
    if not profile.has_train:
        metric = decide.unit_rate(profile.subject.unit)
    rates = training_rates(profile)
    for rate in rates:
        yield Measurement(metric=metric, of=_origin_of(rate), estimate=rate.estimate)
    workers = profile.evidence.workers
    if rates or workers is None:
        return
    for row in workers.rows:
        units_per_s = positive_figures(row.units_per_s)
        if row.num_workers == workers.chosen and units_per_s:
            yield Measurement(
                metric=decide.unit_rate(workers.unit),
                of=READ_FROM["windows"],
                estimate=estimate_windows(units_per_s),
            )


def _origin_of(rate: Rate) -> str:
    """Return what a rate was read from, with the ranks if they trained together."""
    origin = READ_FROM[rate.read_from]
    if rate.read_from in ("confirmed", "training"):
        return f"{origin}, {counted(rate.ranks, 'rank')}"
    return origin


def _trainer_figures(profile: Profile) -> Iterator[Measurement]:
    """Yield the figures of the probe, and those of the worker sweep."""
    probe = profile.evidence.probe
    if probe is not None:
        yield Measurement(
            metric=decide.LARGEST,
            of="under the budget",
            estimate=estimate_single(probe.feasible_max),
            exact=True,
        )
        yield Measurement(
            metric=decide.PEAK_MEMORY,
            of=f"largest micro-batch{allocator_mark(profile.fingerprint.gpu)}",
            estimate=estimate_single(probe.feasible_peak_bytes),
        )
        points = [(point, "cached batches") for point in probe.curve]
        if probe.sustained is not None:
            points.append((probe.sustained, "for a minute"))
        for point, condition in points:
            yield Measurement(
                metric=decide.STEP_RATE,
                of=f"{counted(point.size, 'sequence')}, {condition}",
                estimate=estimate_from_bounds(point.rate, point.timed_steps),
            )
    if profile.evidence.workers is not None:
        yield from _worker_figures(profile.evidence.workers, decide.WINDOW_RATE)


def _own_figures(profile: Profile) -> Iterator[Measurement]:
    """Yield the largest size of your step, figures by size, and those of the loader."""
    probe = profile.evidence.probe
    subject = profile.subject
    if probe is not None:
        mark = allocator_mark(profile.fingerprint.gpu)
        yield Measurement(
            metric=decide.largest(subject.size),
            of="under the budget",
            estimate=estimate_single(probe.feasible_max),
            exact=True,
        )
        yield Measurement(
            metric=decide.PEAK_MEMORY,
            of=f"largest {subject.size}{mark}",
            estimate=estimate_single(probe.feasible_peak_bytes),
        )
        for row in probe.sizes:
            if row.peak_bytes is not None and row.fits:
                yield Measurement(
                    metric=decide.PEAK_MEMORY,
                    of=f"{subject.size_words(row.size)}{mark}",
                    estimate=estimate_single(row.peak_bytes),
                )
        for point in probe.curve:
            yield Measurement(
                metric=decide.unit_rate(subject.unit),
                of=f"{subject.size_words(point.size)}, cached batches",
                estimate=estimate_from_bounds(point.rate, point.timed_steps),
            )
    workers = profile.evidence.workers
    if workers is not None:
        yield from _worker_figures(workers, decide.unit_rate(workers.unit))


def _worker_figures(workers: WorkersEvidence, rate: Metric) -> Iterator[Measurement]:
    """Yield the rates of a worker sweep, in the given metric, and the data waits."""
    cached_rates = positive_figures(workers.cached_units_per_s)
    if cached_rates:
        yield Measurement(
            metric=rate,
            of="upper bound, cached batches",
            estimate=estimate_windows(cached_rates),
        )
    for row in workers.rows:
        of = counted(row.num_workers, "DataLoader worker")
        rates = positive_figures(row.units_per_s)
        if rates:
            yield Measurement(metric=rate, of=of, estimate=estimate_windows(rates))
        yield Measurement(
            metric=decide.DATA_WAIT,
            of=of,
            estimate=estimate_single(row.data_wait_share, scale="linear"),
        )
