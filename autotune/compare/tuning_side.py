"""A tuning as a side of a comparison, from its trial log alone."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.base.estimates import estimate_single
from autotune.base.units import format_bytes
from autotune.base.window_statistics import estimate_windows
from autotune.compare import decide
from autotune.compare.decide import Circumstance, Measurement, Side
from autotune.compare.run_side import hash_model
from autotune.compare.side_words import allocator_mark, counted
from autotune.errors import BadInput
from autotune.machine.values import NOTHING_TIMED, MeasuredGpu
from autotune.profiles.decide.rates import positive_figures
from autotune.trials.decide.plausibility import has_rate
from autotune.trials.job_figures import StepFigures, WindowFigures
from autotune.trials.outcomes import Measured
from autotune.trials.trial_log import TRIAL_LOG_DIRECTORY, read_trial_records
from autotune.trials.values import TrialRecord
from trainer.formats.nested_tables import flatten_table

_VARIED_SETTINGS = ("micro_batch_size", "global_batch_size", "data.")
"""Prefixes of settings that a tuning varies from trial to trial."""
_USUAL_PREFETCH_FACTOR = 2
"""Default of torch, which the name of a figure leaves out."""


def tuning_side(path: Path) -> Side:
    """Return the measurements of a tuning.

    Only trials of the site of the last one are used.

    Raises:
        BadInput: If the trial log has no measured trial of a training step.
    """
    all_records, corrupt_lines = read_trial_records(path / TRIAL_LOG_DIRECTORY)
    measured = [
        record
        for record in all_records
        if record.job in ("step", "window") and record.outcome["kind"] == "measured"
    ]
    if not measured:
        raise BadInput(
            f"{path} has no measured trial of a training step: {len(all_records)}"
            f" records, {corrupt_lines} corrupt",
            next_step="Tune first (autotune tune), or name the profile.",
        )
    last = measured[-1]
    records = [record for record in measured if record.site == last.site]
    left_out = corrupt_lines + len(measured) - len(records)
    measurements = _figures(records)
    settings = flatten_table(last.trial.config)
    return Side(
        kind="tuning",
        name=str(path),
        circumstances=_circumstances(records, settings),
        facts=_facts(last),
        measurements=tuple(measurements),
        settings={
            key: value
            for key, value in settings.items()
            if not key.startswith(_VARIED_SETTINGS)
        },
        headlines=tuple(_headlines(measurements)),
        notes=tuple(_notes(last, left_out)),
    )


def _figures(records: Sequence[TrialRecord]) -> list[Measurement]:
    """Return the figures of trials; repeated trials are one measurement."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        groups.setdefault(_describe(record), []).append(record)
    measurements: list[Measurement] = []
    for description, group in groups.items():
        measurements += _trial_figures(description, group)
    return measurements


def _headlines(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the rates of windows, or else of steps, the fastest first."""
    rates: list[Measurement] = []
    for metric in (decide.WINDOW_RATE, decide.STEP_RATE):
        if not rates:
            rates = [
                measurement
                for measurement in measurements
                if measurement.metric is metric
            ]
    # Equal rates stay in their order, unlike with ``reverse``.
    return sorted(rates, key=lambda measurement: -measurement.estimate.value)


def _circumstances(
    records: Sequence[TrialRecord], settings: Mapping[str, Any]
) -> dict[Circumstance, str]:
    """Return the model, dataset and machine of trials of one site."""
    last = records[-1]
    circumstances: dict[Circumstance, str] = {
        "model": hash_model(last.trial.config.get("model"), {}),
        "row length": str(settings.get("seq_length_tokens")),
        "layout": str(settings.get("layout")),
    }
    datasets = _dataset_hashes(records)
    if datasets:
        circumstances["dataset"] = ", ".join(sorted(datasets))
    machine = last.made_on
    if machine is not None:
        circumstances["machine"] = machine.gpu_name or "cpu"
        circumstances["processors"] = machine.processors
        circumstances.setdefault("dataset", machine.dataset_hash)
    return circumstances


def _dataset_hashes(records: Sequence[TrialRecord]) -> set[str]:
    """Return the datasets that the trials name; the trial log is untrusted."""
    hashes = set()
    for record in records:
        data = record.trial.config.get("data")
        dataset_hash = data.get("dataset_hash") if isinstance(data, dict) else None
        if isinstance(dataset_hash, str):
            hashes.add(dataset_hash)
    return hashes


def _facts(last: TrialRecord) -> dict[str, Any]:
    machine = last.made_on
    if machine is None:
        return {"site": last.site}
    return {
        "machine": machine.machine,
        "processors": machine.processors,
        "torch": machine.torch,
        "site": last.site,
    }


def _notes(last: TrialRecord, left_out: int) -> Iterator[str]:
    if left_out:
        yield f"{left_out} records are left out: corrupt, or of other sites"
    if last.made_on is None:
        yield "its trials do not name their machine: the machines may differ"
    elif not last.made_on.gpu.takes_time:
        yield NOTHING_TIMED


def _describe(record: TrialRecord) -> str:
    """Describe a trial in words that do not depend on this project's version."""
    measured = record.measured
    config = record.trial.config
    words = [
        counted(config.get("micro_batch_size"), "sequence"),
        counted(measured.get("local_ranks", 1), "rank"),
    ]
    if record.job == "step":
        budget_bytes = measured.get("memory_budget_bytes")
        if isinstance(budget_bytes, int):
            words.append(f"under {format_bytes(budget_bytes)}")
        else:
            words.append("without a limit")
        return ", ".join(words)
    words.append(f"global batch {config.get('global_batch_size')}")
    loader = record.trial.loader_arguments
    if measured.get("cached"):
        words.append("cached batches")
    else:
        words.append(counted(loader.get("num_workers"), "DataLoader worker"))
    prefetch_factor = loader.get("prefetch_factor")
    if prefetch_factor != _USUAL_PREFETCH_FACTOR:
        words.append(f"prefetch {prefetch_factor}")
    if measured.get("replayed_step_s"):
        words.append(f"replay of {measured['replayed_step_s']} s")
    return ", ".join(words)


def _trial_figures(of: str, group: Sequence[TrialRecord]) -> Iterator[Measurement]:
    """Yield the figures of trials that measured the same; ``of`` describes them."""
    finished = [record.finished() for record in group]
    measured = [
        (trial.trial, trial.outcome)
        for trial in finished
        if isinstance(trial.outcome, Measured)
    ]
    machine = group[0].made_on
    gpu = MeasuredGpu(name=None, driver=None) if machine is None else machine.gpu
    with_rate = [
        outcome for trial, outcome in measured if has_rate(trial, outcome, gpu)
    ]
    if group[0].job == "window":
        yield from _window_figures(of, [WindowFigures.of(each) for each in with_rate])
        return
    yield from _step_rate(of, [StepFigures.of(each) for each in with_rate])
    peaks_bytes = positive_figures(
        StepFigures.of(outcome).peak_bytes for _, outcome in measured
    )
    if peaks_bytes:
        yield Measurement(
            metric=decide.PEAK_MEMORY,
            of=f"{of}{allocator_mark(gpu)}",
            estimate=estimate_single(max(peaks_bytes)),
        )


def _step_rate(of: str, steps: Sequence[StepFigures]) -> Iterator[Measurement]:
    rates = positive_figures(
        figures.units_per_step / step_s
        for figures in steps
        for step_s in figures.step_s
        if step_s > 0
    )
    if rates:
        yield Measurement(
            metric=decide.STEP_RATE, of=of, estimate=estimate_windows(rates)
        )


def _window_figures(of: str, windows: Sequence[WindowFigures]) -> Iterator[Measurement]:
    """Yield the rate of windows, and the median wait for data."""
    rates = positive_figures(window.padded_units_per_s for window in windows)
    if rates:
        yield Measurement(
            metric=decide.WINDOW_RATE, of=of, estimate=estimate_windows(rates)
        )
    waits = [
        window.data_wait_share
        for window in windows
        if math.isfinite(window.data_wait_share)
    ]
    if waits:
        yield Measurement(
            metric=decide.DATA_WAIT,
            of=of,
            estimate=estimate_single(statistics.median(waits), scale="linear"),
        )
