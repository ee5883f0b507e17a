"""Non-padding tokens/s of a profile and of a run, and drift between them. Pure.

Drift is judged by the confidence interval of the ratio of the two rates.
"""

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
from autotune.base.wording import plural
from autotune.baseline.values import row_of
from autotune.network.values import NetworkEvidence, ScalingRow
from autotune.profiles.values import Profile, fill_share
from autotune.trials.values import FinishedTrial, Measured, StepFigures
from trainer.record.run_record import Run, StepRow

WARM_UP_SHARE = 0.1
"""Warm-up as a share of a run's logged steps: caches, clocks and allocators settle in
it."""
MOST_WARM_UP_STEPS = 20
"""Most logged steps of a run that count as warm-up."""
ALIKE_SHARE = 0.02
"""Share up to which a difference counts as none."""
FAR_SHARE = 0.1
"""Share above which a difference is reported even if the noise is unknown."""
NOTHING_EXPECTED = "no expected value"
_MEMORY_SETTINGS = (
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
"""Settings that a step's memory depends on, besides the micro-batch size."""

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
    """Return the measured rates of the tuned settings.

    The one closest to actual training comes first.
    """
    rates = (
        _rate_of_baseline(profile),
        _rate_of_workers(profile),
        _rate_of_probe(profile),
    )
    return tuple(rate for rate in rates if rate is not None)


def tuned_rate(profile: Profile) -> Rate | None:
    """Return the measured rate that is closest to training.

    Returns:
        None if nothing was measured.
    """
    rates = training_rates(profile)
    return rates[0] if rates else None


def expected_rate(profile: Profile, ranks: int) -> Rate | None:
    """Return the rate to expect of a number of ranks.

    It is measured with as many ranks, else taken from the scaling curve.

    Returns:
        None if it is unknown.
    """
    tuned = tuned_rate(profile)
    if tuned is not None and tuned.ranks == ranks:
        return tuned
    network = profile.evidence.network
    if network is None:
        return None
    return _rate_of_scaling(network, ranks)


def _rate_of_scaling(network: NetworkEvidence, ranks: int) -> Rate | None:
    """Return the rate of a number of ranks on the scaling curve, measured if possible.

    Returns:
        None if the curve has no point with as many ranks.
    """
    rows = [
        row for row in network.scaling if row.nodes * network.ranks_per_node == ranks
    ]
    if not rows:
        return None
    measured_rows = [row for row in rows if row.measured]
    row = measured_rows[0] if measured_rows else rows[0]
    interval = _scaling_interval(row, rows)
    return Rate(
        estimate=estimate_from_bounds(interval),
        interval=interval,
        known="measured" if row.measured else "predicted",
        ranks=ranks,
        read_from="scaling",
        source=f"the scaling curve, {plural(row.nodes, 'node')}",
    )


def _scaling_interval(row: ScalingRow, rows: Sequence[ScalingRow]) -> Interval:
    """Return the rate of ``row``, as uncertain as its prediction from the links.

    Args:
        row: Point of the scaling curve.
        rows: All points with as many ranks; a predicted one may have bounds.
    """
    predicted = row
    for other in rows:
        if not other.measured and other.efficiency_low is not None:
            predicted = other
            break
    if predicted.efficiency_low is None or predicted.efficiency_high is None:
        return Interval(value=row.tokens_per_s)
    return Interval.from_bounds(
        row.tokens_per_s,
        row.tokens_per_s * predicted.efficiency_low / predicted.efficiency,
        row.tokens_per_s * predicted.efficiency_high / predicted.efficiency,
        CONFIDENCE,
    )


def settled_steps(run: Run) -> tuple[StepRow, ...]:
    """Return the logged steps since the last start, without warm-up.

    Earlier ones may have had other settings.
    """
    steps = tuple(step for step in run.steps if step.step > run.header.resumed_step)
    warm_up = max(1, math.ceil(WARM_UP_SHARE * len(steps)))
    return steps[min(MOST_WARM_UP_STEPS, warm_up) :]


def run_rate(run: Run) -> Rate | None:
    """Return the rate of a run's settled steps, or of all if the run is too short.

    None without figures.
    """
    steps = settled_steps(run) or run.steps
    estimate = estimate_plausible_steps(
        [(step.tokens_per_s * step.step_s, step.step_s) for step in steps]
    )
    if estimate is None:
        return None
    return Rate(
        estimate=estimate,
        interval=estimate.interval(),
        ranks=run.header.world_size,
        read_from="run",
        source=f"{len(steps)} logged steps",
    )


def _rate_of_baseline(profile: Profile) -> Rate | None:
    baseline = profile.evidence.baseline
    tuned = row_of(baseline, "tuned")
    if baseline is None or tuned is None:
        return None
    tokens_per_s = positive_figures(tuned.tokens_per_s)
    if not tokens_per_s:
        return None
    estimate = estimate_windows(tokens_per_s)
    return Rate(
        estimate=estimate,
        interval=estimate.interval(),
        ranks=baseline.local_ranks,
        read_from="training",
        source="training on the dataset",
    )


def _rate_of_workers(profile: Profile) -> Rate | None:
    """Return the rate with the profile's number of DataLoader workers.

    It is that with the chosen number if the profile's was not measured.
    """
    workers = profile.evidence.workers
    non_padding_share = fill_share(profile)
    if workers is None or non_padding_share is None:
        return None
    rates_by_count = {
        row.num_workers: positive_figures(row.padded_tokens_per_s)
        for row in workers.rows
    }
    padded_tokens_per_s = rates_by_count.get(profile.train.data.num_workers)
    if not padded_tokens_per_s:
        padded_tokens_per_s = rates_by_count.get(workers.chosen)
    if not padded_tokens_per_s:
        return None
    estimate = estimate_windows(
        [non_padding_share * rate for rate in padded_tokens_per_s]
    )
    return Rate(
        estimate=estimate,
        interval=estimate.interval(),
        ranks=workers.local_ranks,
        read_from="windows",
        source="the worker sweep, times the share of non-padding tokens",
    )


def _rate_of_probe(profile: Profile) -> Rate | None:
    probe = profile.evidence.probe
    non_padding_share = fill_share(profile)
    if probe is None or non_padding_share is None:
        return None
    point = probe.expected_throughput(profile.train.micro_batch_size)
    if point is None:
        return None
    interval = point.padded_rate.scaled(non_padding_share)
    return Rate(
        estimate=estimate_from_bounds(interval, point.timed_steps),
        interval=interval,
        ranks=probe.local_ranks,
        read_from="steps",
        source="steps on full sequences, times the share of non-padding tokens",
    )


def positive_figures(figures: Iterable[float]) -> list[float]:
    """Return the figures that are positive and finite.

    A foreign profile may hold any.
    """
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

    Args:
        profile: Profile that the run was started from.
        run: Run to compare.
        trials: Trials of the profile, which have the expected memory.
        intact: False if the profile was edited: nothing is comparable then.
        other_settings: Settings in which the run deviates from the profile: nothing is
            comparable if there are any.

    Returns:
        Nothing without a profile or steps.
    """
    if profile is None or not run.steps:
        return ()
    all_drifts = (
        *_speed_drifts(profile, run),
        _memory_drift(profile, run, trials),
    )
    reason = _not_comparable_reason(other_settings, intact=intact)
    if reason is None:
        return all_drifts
    verdict = f"not comparable: {reason}"
    return tuple(replace(drift, verdict=verdict) for drift in all_drifts)


def _not_comparable_reason(
    other_settings: Sequence[str], *, intact: bool
) -> str | None:
    """Return why a run cannot be compared with its profile; None if it can."""
    if other_settings:
        return f"trained with other settings ({', '.join(other_settings)})"
    if not intact:
        return "the profile was modified"
    return None


def _speed_drifts(profile: Profile, run: Run) -> tuple[Drift, Drift]:
    """Compare non-padding tokens/s and MFU with the rate to expect of the ranks."""
    achieved = run_rate(run)
    expected = expected_rate(profile, run.header.world_size)
    if expected is None:
        source = f"no rate is known for {plural(run.header.world_size, 'rank')}"
        mfu_source = source
    else:
        source = f"{expected.known}: {expected.source}"
        mfu_source = f"{expected.known}: expected tokens/s times FLOPs per token"
    return (
        _rate_drift("non-padding tokens/s", expected, source, achieved),
        _mfu_drift(run, expected, mfu_source, achieved),
    )


def verdict_of(expected: Estimate, achieved: Estimate) -> str:
    """Judge the ratio of an achieved to an expected figure.

    It is ``drift`` if its interval excludes 1 and it differs from 1 by more than
    ``ALIKE_SHARE``.
    """
    change = difference(expected, achieved)
    deviation = abs(change.value - 1)
    if deviation <= ALIKE_SHARE:
        return "as expected"
    direction = "slower" if change.value < 1 else "faster"
    if change.low is None or change.high is None:
        verdict = f"noise unknown: {reason_without_bounds(expected, achieved)}"
        if deviation > FAR_SHARE:
            verdict += f"; {deviation:.0%} {direction}"
        return verdict
    if change.low <= 1 <= change.high:
        return "within noise"
    return f"drift: {direction}, beyond noise"


def _mfu_drift(
    run: Run, expected: Rate | None, source: str, achieved: Rate | None
) -> Drift:
    """Compare MFU: expected and achieved rate, times MFU per non-padding token/s.

    This factor is the run's own.
    """
    steps = settled_steps(run) or run.steps
    mfu_per_rate = [
        step.mfu / step.tokens_per_s
        for step in steps
        if step.mfu and step.tokens_per_s > 0
    ]
    if not mfu_per_rate:
        no_peak = "the device's peak is unknown"
        return Drift(
            quantity="MFU",
            expected=None,
            expected_source=no_peak,
            achieved=None,
            verdict=no_peak,
        )
    factor = statistics.median(mfu_per_rate)
    return _rate_drift("MFU", expected, source, achieved, factor)


def _rate_drift(
    quantity: Quantity,
    expected: Rate | None,
    source: str,
    achieved: Rate | None,
    factor: float = 1.0,
) -> Drift:
    """Compare two rates, each times a factor."""
    drift = Drift(
        quantity=quantity,
        expected=None if expected is None else expected.interval.scaled(factor),
        expected_source=source,
        achieved=None if achieved is None else achieved.interval.scaled(factor),
        verdict=NOTHING_EXPECTED if expected is None else "the run logged no rate",
    )
    if expected is None or achieved is None:
        return drift
    return replace(
        drift,
        ratio=difference(expected.estimate, achieved.estimate),
        verdict=verdict_of(expected.estimate, achieved.estimate),
    )


def _memory_drift(profile: Profile, run: Run, trials: Sequence[FinishedTrial]) -> Drift:
    """Compare peak memory with the trials.

    It is not judged on a CPU, as a run counts its process, a trial what it adds.
    """
    expected_bytes = _peak_bytes_of_trials(profile, run, trials)
    steps = settled_steps(run) or run.steps
    achieved_bytes = float(max(step.peak_memory_bytes for step in steps))
    ratio = None
    if expected_bytes:
        ratio = achieved_bytes / expected_bytes
    source = "no trial" if expected_bytes is None else "measured: trials"
    size = run.header.sequences_per_micro_batch
    return Drift(
        quantity="peak memory",
        expected=None if expected_bytes is None else Interval(value=expected_bytes),
        expected_source=f"{source} with these settings at micro-batch size {size}",
        achieved=Interval(value=achieved_bytes),
        ratio=None if ratio is None else Interval(value=ratio),
        verdict=_memory_verdict(run.header.device, ratio),
    )


def _memory_verdict(device: str, ratio: float | None) -> str:
    """Judge the ratio of achieved to expected peak memory."""
    if device == "cpu":
        return "not comparable on a CPU: the run counts its whole process"
    if ratio is None:
        return NOTHING_EXPECTED
    if abs(ratio - 1) <= ALIKE_SHARE:
        return "as expected"
    if ratio > 1:
        return "drift: more than in the trial"
    return "drift: less than in the trial"


def _peak_bytes_of_trials(
    profile: Profile, run: Run, trials: Sequence[FinishedTrial]
) -> float | None:
    """Return the highest peak of trials with the run's micro-batch size.

    None if there are none.
    """
    # A trial log has trials of other recipes too.
    settings = {name: getattr(profile.train, name) for name in _MEMORY_SETTINGS}
    settings["micro_batch_size"] = run.header.sequences_per_micro_batch
    peaks_bytes = []
    for trial in trials:
        if trial.trial.job != "step" or not isinstance(trial.outcome, Measured):
            continue
        config = trial.trial.config
        # Settings that a trial does not record are the profile's.
        trial_settings = {**settings, "micro_batch_size": None, **config}
        if config and trial_settings.items() >= settings.items():
            figures = StepFigures.of(trial.outcome)
            # A run counts the memory of its allocator, without non-PyTorch memory.
            peaks_bytes.append(
                float(figures.peak_bytes - (figures.non_pytorch_bytes or 0))
            )
    return max(peaks_bytes, default=None)
