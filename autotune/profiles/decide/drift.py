"""Drift of a run from its profile: tokens/s, MFU and peak memory. Pure.

Drift of tokens/s and MFU is judged by the confidence interval of the ratio of achieved
to expected rate, drift of memory by the ratio alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotune.base.estimates import Estimate, change_between, reason_without_bounds
from autotune.base.interval import Interval
from autotune.base.wording import plural
from autotune.evidence.profile import Profile
from autotune.profiles.decide.rates import Rate, expected_rate
from autotune.profiles.decide.run_rates import run_rate, settled_steps
from autotune.trials.job_figures import StepFigures
from autotune.trials.outcomes import Measured
from autotune.trials.values import FinishedTrial
from trainer.formats.run_record import Run
from trainer.formats.train_config import TrainConfig

ALIKE_SHARE = 0.02
"""Difference from the expected value up to which there is no drift, as a share."""
FAR_SHARE = 0.1
"""Difference from the expected value, as a share, above which the verdict names it even
if the noise is unknown."""
NOTHING_EXPECTED = "no expected value"
"""Verdict on a quantity for which the profile has no expected value."""
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
    "fused_norms",
    "gelu_epilogues",
)
"""Settings that a step's memory depends on, besides the micro-batch size."""
Quantity = Literal["non-padding tokens/s", "MFU", "peak memory"]
"""Quantity of a run that is compared with its profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Comparison of one quantity of a run with its expected value."""

    quantity: Quantity
    expected: Interval | None
    """Expected value; None if the profile has none."""
    expected_source: str
    """Origin of the expected value, or the reason why there is none."""
    achieved: Interval | None
    """Value of the run; None if it logged none."""
    ratio: Interval | None = None
    """Achieved over expected value; None if one of them is None."""
    verdict: str
    """Judgement in words: as expected, within noise, drift with its direction, or the
    reason why the quantity cannot be judged."""


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
        profile: Profile that the run was started from; None if it was not found.
        run: Run to compare.
        trials: Trials of the profile, which have the expected memory.
        intact: False if the profile was edited, so that no verdict is possible.
        other_settings: Settings in which the run deviates from the profile; with any,
            no verdict is possible.

    Returns:
        Drift of non-padding tokens/s, MFU and peak memory; empty without a profile, or
        if the run logged no steps.
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
    """Compare non-padding tokens/s and MFU with those to expect of the run's ranks."""
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
    """Judge an achieved rate, in words.

    The verdict is ``drift`` if the ratio of the rates differs from 1 by more than
    ``ALIKE_SHARE``, and its interval excludes 1.

    Args:
        expected: Rate to expect.
        achieved: Rate of the run.
    """
    change = change_between(expected, achieved)
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
    """Compare the MFU of two rates.

    No profile has an MFU. So both rates are converted by the run's own MFU for each
    non-padding token/s.

    Args:
        run: Run, whose steps may log an MFU.
        expected: Rate to expect; None if it is unknown.
        source: Origin of the expected MFU, or the reason why there is none.
        achieved: Rate of the run; None if it logged no plausible step.
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
    return _rate_drift(
        "MFU", expected, source, achieved, factor=statistics.median(mfu_per_rate)
    )


def _rate_drift(
    quantity: Quantity,
    expected: Rate | None,
    source: str,
    achieved: Rate | None,
    *,
    factor: float = 1.0,
) -> Drift:
    """Compare a quantity that is proportional to the rate.

    Args:
        quantity: Quantity to compare.
        expected: Rate to expect; None if it is unknown.
        source: Origin of the expected value, or the reason why there is none.
        achieved: Rate of the run; None if it logged no plausible step.
        factor: Value of the quantity for each non-padding token/s.
    """
    ratio: Interval | None = None
    if expected is None:
        verdict = NOTHING_EXPECTED
    elif achieved is None:
        verdict = "the run logged no rate"
    else:
        ratio = change_between(expected.estimate, achieved.estimate)
        verdict = verdict_of(expected.estimate, achieved.estimate)
    return Drift(
        quantity=quantity,
        expected=None if expected is None else expected.interval.scaled(factor),
        expected_source=source,
        achieved=None if achieved is None else achieved.interval.scaled(factor),
        ratio=ratio,
        verdict=verdict,
    )


def _memory_drift(profile: Profile, run: Run, trials: Sequence[FinishedTrial]) -> Drift:
    """Compare the peak memory of a run with that of trials with its settings.

    On a CPU it is not judged: a run counts the memory of its whole process, a trial
    only what the step adds to it.
    """
    steps = settled_steps(run) or run.steps
    achieved_bytes = float(max(step.peak_memory_bytes for step in steps))
    expected_bytes = _peak_bytes_of_trials(profile, run, trials)
    source = "no trial"
    expected = None
    if expected_bytes is not None:
        source = "measured: trials"
        expected = Interval(value=expected_bytes)
    ratio = achieved_bytes / expected_bytes if expected_bytes else None
    size = run.header.sequences_per_micro_batch
    return Drift(
        quantity="peak memory",
        expected=expected,
        expected_source=f"{source} with these settings at micro-batch size {size}",
        achieved=Interval(value=achieved_bytes),
        ratio=None if ratio is None else Interval(value=ratio),
        verdict=_memory_verdict(run.header.device, ratio),
    )


def _memory_verdict(device: str, ratio: float | None) -> str:
    """Judge the ratio of achieved to expected peak memory, in words.

    Args:
        device: Device of the run, ``cpu`` or ``cuda``.
        ratio: Achieved over expected peak; None without an expected one.
    """
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
    """Return the highest peak of trials with the run's settings.

    Returns:
        None if no trial has its micro-batch size and the profile's other settings.
    """
    peaks_bytes = []
    for finished in trials:
        if finished.trial.job != "step" or not isinstance(finished.outcome, Measured):
            continue
        config = finished.trial.config
        if config.get("micro_batch_size") != run.header.sequences_per_micro_batch:
            continue
        if not _has_memory_settings(config, profile.train):
            continue
        figures = StepFigures.of(finished.outcome)
        # A run counts the memory of its allocator, without non-PyTorch memory.
        peak_bytes = figures.peak_bytes - (figures.non_pytorch_bytes or 0)
        peaks_bytes.append(float(peak_bytes))
    return max(peaks_bytes, default=None)


def _has_memory_settings(config: Mapping[str, Any], train: TrainConfig) -> bool:
    """Return whether a trial ran with the settings that the memory depends on.

    A trial log also has trials of other settings. Settings that a trial does not record
    are the profile's.

    Args:
        config: Recorded settings of the trial.
        train: Settings of the profile.
    """
    for name in _MEMORY_SETTINGS:
        value = getattr(train, name)
        if config.get(name, value) != value:
            return False
    return True
