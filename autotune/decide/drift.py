"""Whether a run reached what its profile made people expect. Pure.

A difference is judged as two profiles or runs are compared (``autotune.decide.statistics``): by the interval of the
ratio, from blocks of steps that hardly depend on each other.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autotune.core.interval import Interval
from autotune.core.outcome import Measured
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial, StepFigures
from autotune.decide.rates import Rate, expected_rate, run_rate, settled_steps
from autotune.decide.statistics import Estimate, difference, no_spread_of
from trainer.record import Run

ALIKE_SHARE = 0.02
"""Differences below this are nobody's concern."""
FAR_SHARE = 0.1
"""Differences above this are told, noise or not."""
NOTHING_TO_HOLD = "nothing to hold it against"
_OF_MEMORY = (
    "seq_length_tokens", "layout", "precision", "device", "head", "last_layer", "compile_layers", "checkpointing",
    "attention_dropout",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One quantity of a run against what was expected of it."""

    quantity: Literal["real tokens/s", "MFU", "peak memory"]
    expected: Interval | None
    expected_source: str
    achieved: Interval | None
    ratio: Interval | None = None
    verdict: str

    @property
    def is_drift(self) -> bool:
        """Whether it differs, and noise does not explain it."""
        return self.verdict.startswith("drift")


def drifts(
    profile: Profile | None,
    run: Run,
    *,
    trials: Sequence[FinishedTrial] = (),
    intact: bool = True,
    otherwise: Sequence[str] = (),
) -> tuple[Drift, ...]:
    """Compare a run's last start with the profile it was started from; nothing if it has none, or has no steps.

    The profile's trials tell the memory; nothing is comparable if it was edited, or if the run computed otherwise.
    """
    if profile is None or not run.steps:
        return ()
    achieved, expected = run_rate(run), expected_rate(profile, run.header.world_size)
    unknown = f"nothing known of {run.header.world_size} ranks"
    source = unknown if expected is None else f"{expected.known}: {expected.source}"
    speed = _drift("real tokens/s", expected, source, achieved)
    found = (speed, _mfu(run, expected, unknown, achieved), _memory(profile, run, trials))
    if not otherwise and intact:
        return found
    why = f"trained otherwise ({', '.join(otherwise)})" if otherwise else "the profile was edited"
    return tuple(replace(drift, verdict=f"not comparable: {why}") for drift in found)


def verdict_of(expected: Estimate, achieved: Estimate) -> str:
    """``drift`` where the interval of the ratio lies clear of 1, and the ratio is far enough from it to matter."""
    change = difference(expected, achieved)
    off = abs(change.value - 1)
    if off <= ALIKE_SHARE:
        return "as expected"
    way = "slower" if change.value < 1 else "faster"
    if change.low is None or change.high is None:
        why = no_spread_of(expected, achieved)
        return f"noise is not known: {why}" + (f"; {off:.0%} {way}" if off > FAR_SHARE else "")
    return "within noise" if change.low <= 1 <= change.high else f"drift: {way}, beyond noise"


def _mfu(run: Run, expected: Rate | None, unknown: str, achieved: Rate | None) -> Drift:
    """What the expected rate makes of the peak, by the FLOPs of a non-padding token that the run itself counted."""
    steps = settled_steps(run) or run.steps
    shares = [step.mfu / step.real_tokens_per_s for step in steps if step.mfu and step.real_tokens_per_s > 0]
    if not shares:
        no_peak = "the device's peak is not known"
        return Drift(quantity="MFU", expected=None, expected_source=no_peak, achieved=None, verdict=no_peak)
    source = f"{expected.known}: its real tokens/s times the FLOPs of one" if expected else unknown
    return _drift("MFU", expected, source, achieved, statistics.median(shares))


def _drift(
    quantity: Literal["real tokens/s", "MFU"], expected: Rate | None, source: str, achieved: Rate | None,
    factor: float = 1.0,
) -> Drift:  # fmt: skip
    ratio: Interval | None = None
    verdict = NOTHING_TO_HOLD if expected is None else "it logged no speed"
    if expected is not None and achieved is not None:
        ratio = difference(expected.estimate, achieved.estimate)
        verdict = verdict_of(expected.estimate, achieved.estimate)
    return Drift(
        quantity=quantity,
        expected=None if expected is None else expected.interval.scaled(factor),
        expected_source=source,
        achieved=None if achieved is None else achieved.interval.scaled(factor),
        ratio=ratio,
        verdict=verdict,
    )


def _memory(profile: Profile, run: Run, trials: Sequence[FinishedTrial]) -> Drift:
    """On a CPU a run counts its whole process, a trial what it adds to the loaded program: told, and not compared."""
    rows = run.header.rows_per_microbatch_per_rank
    alike = [
        StepFigures.of(done.outcome)
        for done in trials
        if done.trial.job == "step"
        and isinstance(done.outcome, Measured)
        and _is_of(profile, done.trial.measured, rows)
    ]
    # A run counts what its allocator holds; what lies outside of it is the device's.
    expected = max((float(one.peak_bytes - (one.outside_allocator_bytes or 0)) for one in alike), default=None)
    achieved = float(max(step.peak_memory_bytes for step in settled_steps(run) or run.steps))
    ratio = achieved / expected if expected else None
    if run.header.device == "cpu":
        verdict = "not comparable on a CPU: the run counts its whole process"
    elif ratio is None:
        verdict = NOTHING_TO_HOLD
    elif abs(ratio - 1) <= ALIKE_SHARE:
        verdict = "as expected"
    else:
        verdict = f"drift: {'more' if ratio > 1 else 'less'} than its trial took"
    source = f"measured: trials of {rows} rows" if alike else f"no trial of these settings had {rows} rows"
    return Drift(
        quantity="peak memory",
        expected=None if expected is None else Interval(value=expected),
        expected_source=source,
        achieved=Interval(value=achieved),
        ratio=None if ratio is None else Interval(value=ratio),
        verdict=verdict,
    )


def _is_of(profile: Profile, measured: dict[str, object], rows: int) -> bool:
    """Whether a trial took the profile's own step, with so many rows: a ledger has trials of other recipes too."""
    config = measured.get("config")
    if not isinstance(config, dict) or config.get("micro_batch_rows") != rows:
        return False
    train = profile.train.model_dump(mode="json")
    return all(config.get(name, train[name]) == train[name] for name in _OF_MEMORY)
