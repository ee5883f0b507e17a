"""Non-padding tokens/s of a profile and of a run, and drift by the confidence interval of their ratio. Pure."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.base.interval import CONFIDENCE, Interval
from autotune.base.statistics import (
    Estimate,
    difference,
    estimate_from_bounds,
    estimate_plausible_steps,
    estimate_windows,
    reason_without_bounds,
)
from autotune.baseline.values import row_of
from autotune.profiles.values import Profile, fill_share
from autotune.trials.values import FinishedTrial, Measured, StepFigures
from trainer.record.run_record import Run, StepRow

WARM_UP_SHARE, MOST_WARM_UP_ROWS = 0.1, 20
"""Warm-up, as a share and a maximum of a run's logged steps: caches, clocks and
allocators settle in it."""

ALIKE_SHARE = 0.02
"""Share up to which a difference counts as none."""
FAR_SHARE = 0.1
"""Share above which a difference is reported even if the noise is unknown."""
NOTHING_EXPECTED = "no expected value"
_OF_MEMORY = (
    "seq_length_tokens",
    "layout",
    "precision",
    "device",
    "mlm_head",
    "last_layer",
    "compile",
    "activation_checkpointing",
    "attention_dropout",
    "float8",
    "fused_cross_entropy",
)

Quantity = Literal["non-padding tokens/s", "MFU", "peak memory"]
ReadFrom = Literal["training", "windows", "steps", "scaling", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Training throughput in non-padding tokens/s, with its interval and source."""

    estimate: Estimate
    interval: Interval
    known: Literal["measured", "predicted"] = "measured"
    ranks: int
    read_from: ReadFrom
    source: str

    @property
    def value(self) -> float:
        """Throughput in non-padding tokens/s."""
        return self.estimate.value


def training_rates(profile: Profile) -> tuple[Rate, ...]:
    """Return the measured rates of the tuned settings, the one closest to actual training first."""
    found = (_by_training(profile), _by_windows(profile), _by_steps(profile))
    return tuple(rate for rate in found if rate is not None)


def tuned_rate(profile: Profile) -> Rate | None:
    """Return the measured rate that is closest to training.

    None if nothing was measured.
    """
    return next(iter(training_rates(profile)), None)


def expected_rate(profile: Profile, ranks: int) -> Rate | None:
    """Return the rate to expect of ``ranks``: measured with as many, else by the scaling curve; None if unknown."""
    tuned = tuned_rate(profile)
    if tuned is not None and tuned.ranks == ranks:
        return tuned
    network = profile.evidence.network
    rows = (
        [row for row in network.scaling if row.nodes * network.ranks_per_node == ranks]
        if network
        else []
    )
    if not rows:
        return None
    row = next((row for row in rows if row.measured), rows[0])
    predicted = next(
        (one for one in rows if not one.measured and one.efficiency_low is not None),
        row,
    )
    # As uncertain as its prediction from the links.
    ends = predicted.efficiency_low, predicted.efficiency_high
    low, high = (
        None if end is None else row.tokens_per_s * end / predicted.efficiency
        for end in ends
    )
    interval = Interval.from_bounds(row.tokens_per_s, low, high, CONFIDENCE)
    rate = _rate(
        estimate_from_bounds(interval),
        ranks,
        "scaling",
        f"the scaling curve, {row.nodes} nodes",
        interval,
    )
    return replace(rate, known="measured" if row.measured else "predicted")


def settled_steps(run: Run) -> tuple[StepRow, ...]:
    """Return the logged steps since the last start, as earlier ones may have had other settings, without warm-up."""
    rows = tuple(row for row in run.steps if row.step > run.header.resumed_step)
    return rows[min(MOST_WARM_UP_ROWS, max(1, math.ceil(WARM_UP_SHARE * len(rows)))) :]


def run_rate(run: Run) -> Rate | None:
    """Return the rate of a run's settled steps, or of all if the run is too short.

    None without figures.
    """
    rows = settled_steps(run) or run.steps
    found = estimate_plausible_steps(
        [(row.tokens_per_s * row.step_s, row.step_s) for row in rows]
    )
    return (
        None
        if found is None
        else _rate(found, run.header.world_size, "run", f"{len(rows)} logged steps")
    )


def _by_training(profile: Profile) -> Rate | None:
    baseline = profile.evidence.baseline
    tuned = row_of(baseline, "tuned")
    if (
        baseline is None
        or tuned is None
        or not (windows := positive_figures(tuned.tokens_per_s))
    ):
        return None
    return _rate(
        estimate_windows(windows),
        baseline.local_ranks,
        "training",
        "training on the dataset",
    )


def _by_windows(profile: Profile) -> Rate | None:
    """Return the rate with the profile's number of DataLoader workers, or the chosen number if it was not measured."""
    found, fill = profile.evidence.workers, fill_share(profile)
    if found is None or fill is None:
        return None
    by_count = {
        row.num_workers: positive_figures(row.padded_tokens_per_s) for row in found.rows
    }
    windows = by_count.get(profile.train.data.num_workers) or by_count.get(found.chosen)
    if not windows:
        return None
    source = "the worker sweep, times the share of non-padding tokens"
    return _rate(
        estimate_windows([fill * rate for rate in windows]),
        found.local_ranks,
        "windows",
        source,
    )


def _by_steps(profile: Profile) -> Rate | None:
    probe, fill = profile.evidence.probe, fill_share(profile)
    if (
        probe is None
        or fill is None
        or (point := probe.promised(profile.train.micro_batch_size)) is None
    ):
        return None
    interval = point.padded_rate.scaled(fill)
    source = "steps on full sequences, times the share of non-padding tokens"
    return _rate(
        estimate_from_bounds(interval, point.timed_steps),
        probe.local_ranks,
        "steps",
        source,
        interval,
    )


def _rate(
    estimate: Estimate,
    ranks: int,
    read_from: ReadFrom,
    source: str,
    interval: Interval | None = None,
) -> Rate:
    known = estimate.interval() if interval is None else interval
    return Rate(
        estimate=estimate,
        interval=known,
        ranks=ranks,
        read_from=read_from,
        source=source,
    )


def positive_figures(figures: Iterable[float]) -> list[float]:
    """Return the figures that are positive and finite, as a foreign profile may hold any."""
    return [figure for figure in figures if 0 < figure < math.inf]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Comparison of one quantity of a run with its expected value."""

    quantity: Quantity
    expected: Interval | None
    expected_source: str
    achieved: Interval | None
    ratio: Interval | None = None
    verdict: str


def drifts(
    profile: Profile | None,
    run: Run,
    *,
    trials: Sequence[FinishedTrial] = (),
    intact: bool = True,
    other_settings: Sequence[str] = (),
) -> tuple[Drift, ...]:
    """Compare a run since its last start with its profile.

    Return nothing without a profile or steps.

    The expected memory is that of the trials. Nothing is comparable if the profile was
    edited or the run deviates.
    """
    if profile is None or not run.steps:
        return ()
    achieved, expected = run_rate(run), expected_rate(profile, run.header.world_size)
    unknown = f"no rate is known for {run.header.world_size} ranks"
    source = unknown if expected is None else f"{expected.known}: {expected.source}"
    speed = _drift("non-padding tokens/s", expected, source, achieved)
    found = (
        speed,
        _mfu(run, expected, unknown, achieved),
        _memory(profile, run, trials),
    )
    if not other_settings and intact:
        return found
    why = (
        f"trained with other settings ({', '.join(other_settings)})"
        if other_settings
        else "the profile was modified"
    )
    return tuple(replace(drift, verdict=f"not comparable: {why}") for drift in found)


def verdict_of(expected: Estimate, achieved: Estimate) -> str:
    """Judge a ratio: ``drift`` if its interval excludes 1 and it differs from 1 by more than ``ALIKE_SHARE``."""
    change = difference(expected, achieved)
    off = abs(change.value - 1)
    if off <= ALIKE_SHARE:
        return "as expected"
    way = "slower" if change.value < 1 else "faster"
    if change.low is None or change.high is None:
        why = reason_without_bounds(expected, achieved)
        return f"noise unknown: {why}" + (
            f"; {off:.0%} {way}" if off > FAR_SHARE else ""
        )
    return (
        "within noise"
        if change.low <= 1 <= change.high
        else f"drift: {way}, beyond noise"
    )


def _mfu(run: Run, expected: Rate | None, unknown: str, achieved: Rate | None) -> Drift:
    """Compare MFU: expected and achieved rate, times the run's own ratio of MFU to non-padding tokens/s."""
    steps = settled_steps(run) or run.steps
    if not (
        shares := [
            one.mfu / one.tokens_per_s
            for one in steps
            if one.mfu and one.tokens_per_s > 0
        ]
    ):
        no_peak = "the device's peak is unknown"
        return Drift(
            quantity="MFU",
            expected=None,
            expected_source=no_peak,
            achieved=None,
            verdict=no_peak,
        )
    source = (
        f"{expected.known}: expected tokens/s times FLOPs per token"
        if expected
        else unknown
    )
    return _drift("MFU", expected, source, achieved, statistics.median(shares))


def _drift(
    quantity: Quantity,
    expected: Rate | None,
    source: str,
    achieved: Rate | None,
    factor: float = 1.0,
) -> Drift:
    found = Drift(
        quantity=quantity,
        expected=None if expected is None else expected.interval.scaled(factor),
        expected_source=source,
        achieved=None if achieved is None else achieved.interval.scaled(factor),
        verdict=NOTHING_EXPECTED if expected is None else "the run logged no rate",
    )
    if expected is None or achieved is None:
        return found
    sides = expected.estimate, achieved.estimate
    return replace(found, ratio=difference(*sides), verdict=verdict_of(*sides))


def _memory(profile: Profile, run: Run, trials: Sequence[FinishedTrial]) -> Drift:
    """Compare peak memory with the trials.

    Only show it on a CPU, as a run counts its process, a trial what it adds.
    """
    rows = run.header.sequences_per_micro_batch
    # A trial log has trials of other recipes too.
    own = {name: getattr(profile.train, name) for name in _OF_MEMORY} | {
        "micro_batch_size": rows
    }
    alike = []
    for done in trials:
        config = done.trial.config
        is_own = (
            bool(config)
            and {**own, "micro_batch_size": None, **config}.items() >= own.items()
        )
        if is_own and done.trial.job == "step" and isinstance(done.outcome, Measured):
            alike.append(StepFigures.of(done.outcome))
    # A run counts the memory of its allocator, without non-PyTorch memory.
    expected = max(
        (float(one.peak_bytes - (one.non_pytorch_bytes or 0)) for one in alike),
        default=None,
    )
    achieved = float(
        max(step.peak_memory_bytes for step in settled_steps(run) or run.steps)
    )
    ratio = achieved / expected if expected else None
    if run.header.device == "cpu":
        verdict = "not comparable on a CPU: the run counts its whole process"
    elif ratio is None:
        verdict = NOTHING_EXPECTED
    elif abs(ratio - 1) <= ALIKE_SHARE:
        verdict = "as expected"
    else:
        verdict = f"drift: {'more' if ratio > 1 else 'less'} than in the trial"
    source = (
        f"{'measured: trials' if alike else 'no trial'} with these settings at"
        f" micro-batch size {rows}"
    )
    return Drift(
        quantity="peak memory",
        expected=None if expected is None else Interval(value=expected),
        expected_source=source,
        achieved=Interval(value=achieved),
        ratio=None if ratio is None else Interval(value=ratio),
        verdict=verdict,
    )
