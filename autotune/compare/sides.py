"""Sides of a comparison, read from profiles, tunings, runs and datasets."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.advice.read_context import read_measured_run
from autotune.base.estimates import Estimate, Scale, estimate_single
from autotune.base.interval import Interval
from autotune.base.step_statistics import estimate_plausible_steps, paired_change
from autotune.base.units import format_bytes
from autotune.base.window_statistics import estimate_from_bounds, estimate_windows
from autotune.compare import decide
from autotune.compare.decide import (
    Circumstance,
    Comparison,
    Measurement,
    Metric,
    Side,
    compare,
)
from autotune.errors import BadInput, UsageError
from autotune.evidence.profile import Profile
from autotune.evidence.workers import WorkersEvidence
from autotune.machine.values import is_pretended
from autotune.profiles.decide.rates import Rate, positive_figures, training_rates
from autotune.profiles.decide.run_rates import settled_steps
from autotune.profiles.store import StoredProfile, read_profile
from autotune.trials.decide.plausibility import has_rate
from autotune.trials.job_figures import StepFigures, WindowFigures
from autotune.trials.outcomes import Measured
from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY, read_trial_records
from autotune.trials.values import TrialRecord
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.manifest import MANIFEST_NAME, Manifest, read_manifest
from trainer.formats.nested_tables import flatten_table
from trainer.formats.run_record import RUN_FILE, Run

_LOSS_SHARE = 0.5
"""Share of the steps that both runs took, the later part, in which their losses are
compared."""
_READ_FROM = {
    "confirmed": "windows as training runs",
    "training": "windows with the tuned settings",
    "windows": "windows of the worker sweep",
    "steps": "steps of the probe",
}
_NOTHING_TIMED = (
    "its GPU is a pretended one: memory is that of torch's allocator, and there are no"
    " timings"
)
_BY_STEPS = "the run's steps"
_OF_A_TRIAL = ("micro_batch_size", "global_batch_size", "data.")
"""Prefixes of settings that a tuning varies from trial to trial."""


def compare_paths(a: Path, b: Path) -> Comparison:
    """Compare two profiles, tunings, runs or datasets, or a profile with a run.

    Raises:
        AutotuneError: If a side cannot be read, or the two cannot be compared.
    """
    (first, mine), (second, theirs) = _side(a), _side(b)
    if first.kind != second.kind and {first.kind, second.kind} != {"profile", "run"}:
        what = f"{a} is a {first.kind} and {b} is a {second.kind}: no figures in common"
        raise UsageError(
            what, next_step="Compare two of a kind, or a profile with a run."
        )
    return compare(first, second, _loss(mine, theirs) if mine and theirs else None)


def _side(path: Path) -> tuple[Side, Run | None]:
    """Return the side at a path, and the run if it is one."""
    if (path / RUN_FILE).is_file():
        run = read_measured_run(path)
        return _run_side(run, str(path)), run
    if (path / TRIAL_LOG_DIRECTORY).is_dir():
        return _tuning_side(path), None
    if (path / MANIFEST_NAME).is_file():
        return _dataset_side(read_manifest(path), str(path)), None
    if path.is_dir():
        raise BadInput(
            f"{path} is neither a run (it has no {RUN_FILE}), a tuning (no"
            f" {TRIAL_LOG_DIRECTORY}/) nor a dataset (no {MANIFEST_NAME})",
            next_step="Name a profile, a run, a tuning or a dataset.",
        )
    return _profile_side(read_profile(path), str(path)), None


def _dataset_side(manifest: Manifest, name: str) -> Side:
    figures = tuple(
        Measurement(metric=metric, of=of, estimate=estimate_single(count), exact=True)
        for of, split in (
            ("training", manifest.train),
            ("validation", manifest.validation),
        )
        for metric, count in (
            (decide.SAMPLES, split.samples),
            (decide.TOKENS, split.tokens),
        )
        if count
    )
    return Side(
        kind="dataset",
        name=name,
        circumstances={"dataset": manifest.dataset_hash},
        facts={},
        measurements=figures,
        settings=flatten_table(
            manifest.model_dump(mode="json", exclude={"train", "validation"})
        ),
    )


def _profile_side(stored: StoredProfile, name: str) -> Side:
    profile = stored.profile
    made_on = profile.fingerprint
    common: dict[Circumstance, str] = {
        "machine": made_on.gpu_name or "cpu",
        "processors": f"{made_on.allotted_cpus} of {made_on.cpu_model or 'n/a'}",
    }
    if profile.constraints.memory_budget_bytes is not None:
        common["memory budget"] = str(profile.constraints.memory_budget_bytes)
    notes = (
        "the profile was edited by hand: its figures are those of the settings before",
    )
    side = _trainer_side if profile.has_train else _own_side
    return replace(
        side(profile, name, common),
        common_settings=_common_settings(profile),
        headlines=tuple(_headlines(profile)),
        facts={
            **{
                f"source of the {role}": sha256
                for role, sha256 in profile.subject.sources.items()
            },
            **made_on.model_dump(mode="json", exclude={"model_sha256", "dataset_hash"}),
            "tool_version": profile.provenance.tool_version,
        },
        notes=(
            *(() if stored.intact else notes),
            *((_NOTHING_TIMED,) if is_pretended(made_on.driver) else ()),
        ),
    )


def _common_settings(profile: Profile) -> dict[str, Any]:
    """Return the settings that profiles of every subject have, by the same names."""
    constraints = profile.constraints.model_dump(mode="json", exclude_none=True)
    return {
        "subject.kind": profile.subject.kind,
        profile.subject.size: profile.size,
        "num_workers": profile.num_workers,
        **flatten_table({"constraints": constraints}),
    }


def _headlines(profile: Profile) -> Iterable[Measurement]:
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
        figures = positive_figures(row.units_per_s)
        if row.num_workers == workers.chosen and figures:
            yield Measurement(
                metric=decide.unit_rate(workers.unit),
                of=_READ_FROM["windows"],
                estimate=estimate_windows(figures),
            )


def _trainer_side(
    profile: Profile, name: str, common: Mapping[Circumstance, str]
) -> Side:
    """Return a profile of the bundled trainer, without facts, speeds and notes."""
    train, made_on = profile.train, profile.fingerprint
    probe, workers = profile.evidence.probe, profile.evidence.workers
    ranks = workers.local_ranks if workers else probe.local_ranks if probe else None
    circumstances: dict[Circumstance, str] = {
        "model": made_on.model_sha256,
        "dataset": made_on.dataset_hash,
        "global batch": f"{train.global_batch_size} sequences",
        "row length": str(train.seq_length_tokens),
        "layout": train.layout,
        **common,
        **({} if ranks is None else {"ranks": str(ranks)}),
    }
    return Side(
        kind="profile",
        name=name,
        circumstances=circumstances,
        settings=flatten_table(
            train.model_dump(mode="json")
            | profile.model_dump(mode="json", include={"constraints"})
        ),
        facts={},
        measurements=tuple(_profile_figures(profile)),
    )


def _own_side(profile: Profile, name: str, common: Mapping[Circumstance, str]) -> Side:
    """Return a profile of your own code, without facts, speeds and notes.

    Its source is a fact and no circumstance: two versions of one step are what you want
    to compare.
    """
    subject = profile.subject
    measured = subject.function("step") or subject.function("loader") or subject.words
    circumstances: dict[Circumstance, str] = {"model": measured, **common}
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
        facts={},
        measurements=(
            *_own_step_figures(profile),
            *_own_loader_figures(profile.evidence.workers),
        ),
    )


def _own_step_figures(profile: Profile) -> Iterable[Measurement]:
    """Yield the largest size of a step of yours, and peaks and rates by size."""
    probe, subject = profile.evidence.probe, profile.subject
    if probe is None:
        return
    yield Measurement(
        metric=decide.largest(subject.size),
        of="under the budget",
        estimate=estimate_single(probe.feasible_max),
        exact=True,
    )
    allocator = ", allocator" if is_pretended(profile.fingerprint.driver) else ""
    yield Measurement(
        metric=decide.PEAK_MEMORY,
        of=f"largest {subject.size}{allocator}",
        estimate=estimate_single(probe.feasible_peak_bytes),
    )
    for row in probe.sizes:
        if row.peak_bytes is not None and row.fits:
            yield Measurement(
                metric=decide.PEAK_MEMORY,
                of=f"{subject.size_words(row.size)}{allocator}",
                estimate=estimate_single(row.peak_bytes),
            )
    for point in probe.curve:
        yield Measurement(
            metric=decide.unit_rate(subject.unit),
            of=f"{subject.size_words(point.size)}, cached batches",
            estimate=estimate_from_bounds(point.rate, point.timed_steps),
        )


def _own_loader_figures(workers: WorkersEvidence | None) -> Iterable[Measurement]:
    """Yield the rates of a loader of yours, and the waits for its data."""
    if workers is None:
        return
    metric = decide.unit_rate(workers.unit)
    if rates := positive_figures(workers.cached_units_per_s):
        yield Measurement(
            metric=metric,
            of="upper bound, cached batches",
            estimate=estimate_windows(rates),
        )
    for row in workers.rows:
        of = _many(row.num_workers, "DataLoader worker")
        if rates := positive_figures(row.units_per_s):
            yield Measurement(metric=metric, of=of, estimate=estimate_windows(rates))
        yield Measurement(
            metric=decide.DATA_WAIT,
            of=of,
            estimate=estimate_single(row.data_wait_share, scale="linear"),
        )


def _origin_of(rate: Rate) -> str:
    """Return what a rate was read from, with the ranks if they trained together."""
    origin = _READ_FROM[rate.read_from]
    if rate.read_from in ("confirmed", "training"):
        return f"{origin}, {_many(rate.ranks, 'rank')}"
    return origin


def _profile_figures(profile: Profile) -> Iterable[Measurement]:
    probe, workers = profile.evidence.probe, profile.evidence.workers
    if probe is not None:
        yield Measurement(
            metric=decide.LARGEST,
            of="under the budget",
            estimate=estimate_single(probe.feasible_max),
            exact=True,
        )
        # Peaks of a pretended GPU are not compared with those of a real one.
        of_peak = (
            "largest"
            f" micro-batch{', allocator' * is_pretended(profile.fingerprint.driver)}"
        )
        yield Measurement(
            metric=decide.PEAK_MEMORY,
            of=of_peak,
            estimate=estimate_single(probe.feasible_peak_bytes),
        )
        sustained = (
            [] if probe.sustained is None else [(probe.sustained, "for a minute")]
        )
        for point, how in [
            *((point, "cached batches") for point in probe.curve),
            *sustained,
        ]:
            of = f"{_many(point.size, 'sequence')}, {how}"
            yield Measurement(
                metric=decide.STEP_RATE,
                of=of,
                estimate=estimate_from_bounds(point.rate, point.timed_steps),
            )
    if workers is not None:
        if rates := positive_figures(workers.cached_units_per_s):
            yield Measurement(
                metric=decide.WINDOW_RATE,
                of="upper bound, cached batches",
                estimate=estimate_windows(rates),
            )
        for row in workers.rows:
            of = _many(row.num_workers, "DataLoader worker")
            if rates := positive_figures(row.units_per_s):
                yield Measurement(
                    metric=decide.WINDOW_RATE, of=of, estimate=estimate_windows(rates)
                )
            yield Measurement(
                metric=decide.DATA_WAIT,
                of=of,
                estimate=estimate_single(row.data_wait_share, scale="linear"),
            )


def _run_side(run: Run, name: str) -> Side:
    header, config, rows = run.header, run.header.config, settled_steps(run)
    circumstances: dict[Circumstance, str] = {
        "model": _model_of(config.get("model"), header.name),
        "dataset": header.dataset_hash,
        "machine": header.device,
        "ranks": str(header.world_size),
        "global batch": f"{header.global_batch_size} sequences",
        "row length": str(config.get("seq_length_tokens")),
        "layout": header.layout,
    }
    rate = _steps(
        decide.TRAINING_RATE,
        [(row.tokens_per_s * row.step_s, row.step_s) for row in rows],
    )
    waits = [
        (row.communication_s, row.step_s)
        for row in rows
        if row.communication_s is not None
    ]
    measurements = [
        *rate,
        *_steps(
            decide.DATA_WAIT,
            [(row.data_wait_s, row.step_s) for row in rows],
            scale="linear",
        ),
        *_steps(decide.WAIT_FOR_RANKS, waits, scale="linear"),
        *_steps(
            decide.MFU,
            [(row.mfu * row.step_s, row.step_s) for row in rows if row.mfu is not None],
        ),
    ]
    if rows and rows[-1].peak_memory_bytes > 0:
        peak = estimate_single(rows[-1].peak_memory_bytes)
        measurements.append(
            Measurement(metric=decide.PEAK_MEMORY, of=_BY_STEPS, estimate=peak)
        )
    return Side(
        kind="run",
        name=name,
        settings=flatten_table(config),
        circumstances=circumstances,
        facts={
            "device": header.device,
            "attention": header.attention,
            **header.versions,
        },
        measurements=tuple(measurements),
        headlines=tuple(rate),
        notes=(
            (
                f"{len(run.steps) - len(rows)} of {len(run.steps)} logged steps are"
                " warm-up and left out"
            ),
            "runs record their device, and not their host",
            *(("the run has not finished, or was killed",) if run.end is None else ()),
        ),
    )


def _steps(
    metric: Metric, pairs: Sequence[tuple[float, float]], *, scale: Scale = "log"
) -> list[Measurement]:
    """Return a figure of steps.

    Returns:
        One measurement, or an empty list if fewer than two steps have sound figures.
    """
    found = estimate_plausible_steps(pairs, scale=scale)
    return (
        []
        if found is None or found.n < 2
        else [Measurement(metric=metric, of=_BY_STEPS, estimate=found)]
    )


def _model_of(model: object, name: object = "") -> str:
    """Return the hash of a model's config without its name.

    If there is no config, the name is hashed.
    """
    return canonical_sha256(
        {k: v for k, v in model.items() if k != "name"}
        if isinstance(model, dict)
        else name
    )


def _loss(a: Run, b: Run) -> tuple[Measurement, Measurement, Interval] | None:
    """Return both losses over the later part of the common steps, and their ratio.

    Returns:
        The losses of A and B and the ratio, or None if no steps are common.
    """
    losses = [
        {
            row.step: row.loss
            for row in run.steps
            if row.loss is not None and math.isfinite(row.loss) and row.loss > 0
        }
        for run in (a, b)
    ]
    common = sorted(losses[0].keys() & losses[1].keys())
    later = common[len(common) - math.ceil(_LOSS_SHARE * len(common)) :]
    if not later:
        return None
    mine, theirs = ([side[step] for step in later] for side in losses)
    of = f"at the same steps, {later[0]} to {later[-1]}"
    estimates = (
        Estimate(
            value=statistics.fmean(one),
            n=len(one),
            reason_without_variance="too few steps",
        )
        for one in (mine, theirs)
    )
    first, second = (
        Measurement(metric=decide.LOSS, of=of, estimate=one) for one in estimates
    )
    return first, second, paired_change(mine, theirs)


def _tuning_side(path: Path) -> Side:
    every, corrupt = read_trial_records(path / TRIAL_LOG_DIRECTORY)
    measured = [
        one
        for one in every
        if one.job in ("step", "window") and one.outcome["kind"] == "measured"
    ]
    if not measured:
        what = (
            f"{path} has no measured trial of a training step: {len(every)} records,"
            f" {corrupt} corrupt"
        )
        raise BadInput(
            what, next_step="Tune first (autotune tune), or name the profile."
        )
    records = [one for one in measured if one.site == measured[-1].site]
    left_out = corrupt + len(measured) - len(records)
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        groups.setdefault(_what(record), []).append(record)
    measurements = [
        one for of, group in groups.items() for one in _trial_figures(of, group)
    ]
    config = records[-1].trial.config
    settings = flatten_table(config)
    windows = [one for one in measurements if one.metric is decide.WINDOW_RATE]
    keeps_up = windows or [
        one for one in measurements if one.metric is decide.STEP_RATE
    ]
    circumstances: dict[Circumstance, str] = {
        "model": _model_of(config.get("model"), {}),
        "row length": str(settings.get("seq_length_tokens")),
        "layout": str(settings.get("layout")),
    }
    named = (
        _table(record.trial.config, "data").get("dataset_hash") for record in records
    )
    if datasets := {one for one in named if isinstance(one, str)}:
        circumstances["dataset"] = ", ".join(sorted(datasets))
    facts: dict[str, Any] = {"site": records[-1].site}
    if (where := records[-1].made_on) is not None:  # all of these are of one site
        circumstances |= {
            "machine": where.gpu_name or "cpu",
            "processors": where.processors,
        }
        circumstances.setdefault("dataset", where.dataset_hash)
        facts = {
            "machine": where.machine,
            "processors": where.processors,
            "torch": where.torch,
        } | facts
    notes = (
        [f"{left_out} records are left out: corrupt, or of other sites"]
        if left_out
        else []
    )
    notes += [_NOTHING_TIMED] if where and is_pretended(where.driver) else []
    notes += (
        []
        if where
        else ["its trials do not name their machine: the machines may differ"]
    )
    return Side(
        kind="tuning",
        name=str(path),
        circumstances=circumstances,
        facts=facts,
        measurements=tuple(measurements),
        settings={
            key: value
            for key, value in settings.items()
            if not key.startswith(_OF_A_TRIAL)
        },
        headlines=tuple(sorted(keeps_up, key=lambda one: -one.estimate.value)),
        notes=tuple(notes),
    )


def _what(record: TrialRecord) -> str:
    """Describe a trial in words that do not depend on this project's version."""
    measured = record.measured
    config, loader = record.trial.config, record.trial.loader_arguments
    words = [
        _many(config.get("micro_batch_size"), "sequence"),
        _many(measured.get("local_ranks", 1), "rank"),
    ]
    if record.job == "step":
        budget = measured.get("memory_budget_bytes")
        return ", ".join(
            [
                *words,
                (
                    f"under {format_bytes(budget)}"
                    if isinstance(budget, int)
                    else "without a limit"
                ),
            ]
        )
    how = (
        "cached batches"
        if measured.get("cached")
        else _many(loader.get("num_workers"), "DataLoader worker")
    )
    how += (
        ""
        if loader.get("prefetch_factor") == 2
        else f", prefetch {loader.get('prefetch_factor')}"
    )
    how += (
        f", replay of {measured['replayed_step_s']} s"
        if measured.get("replayed_step_s")
        else ""
    )
    return ", ".join([*words, f"global batch {config.get('global_batch_size')}", how])


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of an untrusted trial log; empty if it is not a table."""
    found = table.get(name)
    return found if isinstance(found, dict) else {}


def _many(count: object, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _trial_figures(of: str, group: Sequence[TrialRecord]) -> Iterable[Measurement]:
    where = group[0].made_on  # all of these are of one site
    gpu_name, driver = (None, None) if where is None else (where.gpu_name, where.driver)
    finished = map(TrialRecord.finished, group)
    measured = [
        (one.trial, one.outcome)
        for one in finished
        if isinstance(one.outcome, Measured)
    ]
    rated = [
        outcome
        for trial, outcome in measured
        if has_rate(trial, outcome, gpu_name=gpu_name, driver=driver)
    ]
    if group[0].job == "step":
        timed = map(StepFigures.of, rated)
        if rates := positive_figures(
            one.units_per_step / s for one in timed for s in one.step_s if s > 0
        ):
            yield Measurement(
                metric=decide.STEP_RATE, of=of, estimate=estimate_windows(rates)
            )
        if peaks := positive_figures(
            StepFigures.of(outcome).peak_bytes for _, outcome in measured
        ):
            if is_pretended(driver):
                of += ", allocator"
            yield Measurement(
                metric=decide.PEAK_MEMORY, of=of, estimate=estimate_single(max(peaks))
            )
        return
    windows = [WindowFigures.of(outcome) for outcome in rated]
    if rates := positive_figures(one.padded_units_per_s for one in windows):
        yield Measurement(
            metric=decide.WINDOW_RATE, of=of, estimate=estimate_windows(rates)
        )
    if waits := [
        one.data_wait_share for one in windows if math.isfinite(one.data_wait_share)
    ]:
        yield Measurement(
            metric=decide.DATA_WAIT,
            of=of,
            estimate=estimate_single(statistics.median(waits), scale="linear"),
        )
