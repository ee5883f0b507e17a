import math
from dataclasses import replace

import numpy as np
import pytest

from autotune.base.estimates import estimate_single
from autotune.base.step_statistics import estimate_steps
from autotune.base.window_statistics import estimate_windows
from autotune.profiles.decide.drift import Drift, drifts, verdict_of
from autotune.profiles.decide.rates import Rate, tuned_rate
from autotune.profiles.values import Profile
from autotune.trials.values import FinishedTrial
from testbed.examples.profiles import example_profile as cpu_profile
from testbed.examples.tuning import example_inputs
from tests.autotune.advice.runs import add_evidence, noisy, run_of
from trainer.record.run_record import Run

# Verdicts on many noisy runs.

EXPECTED_TOKENS_PER_S = 100.0
STEP_NOISE = 0.05
"""Standard deviation of the logarithm of a step's rate."""
WINDOW_NOISE = 0.015
"""Standard deviation of the logarithm of a window's rate."""
RUNS = 200
"""Simulated runs of each test."""
LUCK_STANDARD_ERRORS = 2.6
"""Standard errors that a share of runs may be above its mean by chance: once in 200
times."""


def verdicts_of_runs(
    steps: int, autocorrelation: float, achieved_share: float
) -> list[str]:
    """Return the verdicts on runs with a share of the expected speed.

    Args:
        steps: Steps of each run.
        autocorrelation: Correlation of the rates of neighbouring steps.
        achieved_share: Share of the expected speed that the runs reach.
    """
    verdicts = []
    for seed in range(RUNS):
        # Not the seed of ``noisy``, so that windows and steps are independent.
        rng = np.random.default_rng(10_000 + seed)
        window_noise = np.exp(rng.normal(scale=WINDOW_NOISE, size=6))
        windows = EXPECTED_TOKENS_PER_S * window_noise
        rates = noisy(
            seed,
            steps,
            autocorrelation=autocorrelation,
            noise=STEP_NOISE,
            mean=achieved_share * EXPECTED_TOKENS_PER_S,
        )
        expected = estimate_windows(windows.tolist())
        achieved = estimate_steps([1.0] * steps, [1 / rate for rate in rates])
        verdicts.append(verdict_of(expected, achieved))
    return verdicts


def share_of(verdicts: list[str], start: str) -> float:
    """Return the share of verdicts that start like this."""
    return sum(verdict.startswith(start) for verdict in verdicts) / len(verdicts)


@pytest.mark.parametrize("steps", [60, 250])
@pytest.mark.parametrize("autocorrelation", [0.0, 0.5, 0.8, 0.95])
def test_same_speed_is_seldom_drift(steps, autocorrelation):
    verdicts = verdicts_of_runs(steps, autocorrelation, achieved_share=1.0)
    # Bounds of 95 % exclude the truth in 5 % of runs.
    standard_error = math.sqrt(0.05 * 0.95 / RUNS)
    highest_share = 0.05 + LUCK_STANDARD_ERRORS * standard_error
    assert share_of(verdicts, "drift") <= highest_share


@pytest.mark.parametrize(
    ("steps", "autocorrelation"), [(60, 0.0), (120, 0.5), (400, 0.8)]
)
def test_a_tenth_slower_is_drift(steps, autocorrelation):
    verdicts = verdicts_of_runs(steps, autocorrelation, achieved_share=0.9)
    assert share_of(verdicts, "drift") >= 0.95
    assert share_of(verdicts, "noise unknown") <= 0.05


def test_run_too_short_for_its_variation_is_undecided():
    verdicts = verdicts_of_runs(60, autocorrelation=0.97, achieved_share=0.9)
    assert share_of(verdicts, "drift") < 0.3
    assert share_of(verdicts, "noise unknown") > 0.5


# Drift of one run's rate.


def speed_drift(profile: Profile, run: Run, **arguments) -> Drift:
    """Return the drift of non-padding tokens/s."""
    speed, _, _ = drifts(profile, run, **arguments)
    return speed


@pytest.fixture
def tuned_profile() -> Profile:
    """Return a profile with a probe, a worker sweep and a baseline."""
    return add_evidence(probe=True, workers=True, baseline=True)


def run_with_factor(expected: Rate, factor: float) -> Run:
    """Return a run with hardly any noise at a factor of the expected rate."""
    rate = factor * expected.value
    warm_up = [0.2 * rate] * 2
    settled = [rate * (1 + 0.001 * (step % 3)) for step in range(38)]
    return run_of(warm_up + settled)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, "as expected"),
        (0.9, "drift: slower, beyond noise"),
        (1.1, "drift: faster, beyond noise"),
    ],
)
def test_drift_beyond_noise_is_named(tuned_profile, factor, verdict):
    run = run_with_factor(tuned_rate(tuned_profile), factor)
    speed = speed_drift(tuned_profile, run)
    assert speed.verdict == verdict
    assert speed.ratio.value == pytest.approx(factor, rel=0.002)
    assert speed.ratio.low < speed.ratio.value < speed.ratio.high


@pytest.mark.parametrize("factor", [1.0, 0.9, 1.1])
def test_drift_is_shown_with_95_percent_bounds(tuned_profile, factor):
    run = run_with_factor(tuned_rate(tuned_profile), factor)
    speed = speed_drift(tuned_profile, run)
    for interval in (speed.ratio, speed.expected, speed.achieved):
        assert interval.confidence == 0.95


@pytest.fixture
def scaled_profile() -> Profile:
    """Return a profile with a probe of 2 ranks and a scaling curve."""
    return add_evidence(probe=True, network=True)


def test_drift_from_a_prediction_has_its_confidence(scaled_profile):
    rates = noisy(2, 200, autocorrelation=0.0, noise=0.01, mean=1e5)
    speed = speed_drift(scaled_profile, run_of(rates, ranks=8))
    assert speed.expected.confidence == 0.98
    assert speed.ratio.confidence == 0.95
    assert speed.expected_source.startswith("predicted")


def windows_around(tokens_per_s: float):
    """Return the estimate of 15 windows with hardly any noise."""
    spread = [tokens_per_s, tokens_per_s + 0.01, tokens_per_s - 0.01]
    return estimate_windows(spread * 5)


@pytest.mark.parametrize(
    ("achieved", "verdict"),
    [
        pytest.param(windows_around(98.5), "as expected", id="alike within 2 %"),
        pytest.param(
            windows_around(97.5), "drift: slower, beyond noise", id="2.5 % slower"
        ),
    ],
)
def test_verdict_without_noise_ignores_two_percent(achieved, verdict):
    assert verdict_of(windows_around(100.0), achieved) == verdict


@pytest.mark.parametrize(
    ("achieved_tokens_per_s", "verdict"),
    [
        pytest.param(
            95.0, "noise unknown: one figure shows no spread", id="a little slower"
        ),
        pytest.param(
            50.0,
            "noise unknown: one figure shows no spread; 50% slower",
            id="far slower",
        ),
    ],
)
def test_verdict_on_single_figures_is_open(achieved_tokens_per_s, verdict):
    expected = estimate_single(100.0)
    assert verdict_of(expected, estimate_single(achieved_tokens_per_s)) == verdict


def test_unknown_ranks_have_no_expected_rate():
    speed = speed_drift(add_evidence(probe=True), run_of([5.0] * 10, ranks=7))
    assert speed.expected is None
    assert speed.ratio is None
    assert speed.verdict == "no expected value"
    assert speed.expected_source == "no rate is known for 7 ranks"


# Drift of a run on a GPU, with its memory and MFU.

EXAMPLE_TRIALS = 320
"""Trials of the example: one for each micro-batch size from 1 to 320."""
EXAMPLE_MFU = 0.344
"""MFU that each step of the example's run logs."""


class GpuExample:
    """Run of the example on a GPU, with the profile and trials that it started from."""

    def __init__(self) -> None:
        profiles, runs = example_inputs(EXAMPLE_TRIALS)
        self.profile = profiles[0].profile
        self.trials: tuple[FinishedTrial, ...] = profiles[0].trials
        self.run = runs[0].run

    def drifts(self, **arguments) -> tuple[Drift, ...]:
        """Return the drifts of speed, MFU and memory."""
        return drifts(self.profile, self.run, trials=self.trials, **arguments)

    def memory_drift(self) -> Drift:
        """Return the drift of peak memory."""
        _, _, memory = self.drifts()
        return memory


@pytest.fixture
def gpu_example() -> GpuExample:
    return GpuExample()


def test_memory_is_compared_with_the_same_trial(gpu_example):
    memory = gpu_example.memory_drift()
    assert memory.expected.value == pytest.approx(memory.achieved.value, rel=0.05)
    assert memory.verdict == "as expected"
    assert memory.ratio.low is None


def test_more_memory_is_drift(gpu_example):
    *steps, last = gpu_example.run.steps
    doubled = last.model_copy(update={"peak_memory_bytes": 2 * last.peak_memory_bytes})
    gpu_example.run = replace(gpu_example.run, steps=(*steps, doubled))
    assert gpu_example.memory_drift().verdict == "drift: more than in the trial"


def with_dense_head(finished: FinishedTrial) -> FinishedTrial:
    """Return a finished trial as if it had run with the dense MLM head."""
    config = finished.trial.measured["config"] | {"mlm_head": "dense"}
    trial = replace(finished.trial, measured={"config": config})
    return replace(finished, trial=trial)


def test_memory_of_another_recipe_is_not_expected(gpu_example):
    gpu_example.trials = tuple(
        with_dense_head(finished) for finished in gpu_example.trials
    )
    memory = gpu_example.memory_drift()
    assert memory.expected is None
    assert memory.verdict == "no expected value"


def test_memory_on_a_cpu_is_not_comparable():
    _, _, memory = drifts(cpu_profile(), run_of([5.0] * 10))
    assert memory.verdict.startswith("not comparable on a CPU")


def test_mfu_drifts_like_the_rate(gpu_example):
    speed, mfu, _ = gpu_example.drifts()
    assert mfu.ratio == speed.ratio
    assert mfu.verdict == speed.verdict
    assert mfu.expected.value / mfu.achieved.value == pytest.approx(
        speed.expected.value / speed.achieved.value
    )


def test_achieved_mfu_is_the_logged_one(gpu_example):
    _, mfu, _ = gpu_example.drifts()
    assert mfu.achieved.value == pytest.approx(EXAMPLE_MFU, rel=0.01)


# Runs without a comparison.


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(
            {"other_settings": ("layout", "precision")},
            "trained with other settings (layout, precision)",
            id="other settings",
        ),
        pytest.param(
            {"intact": False}, "the profile was modified", id="edited profile"
        ),
    ],
)
def test_other_training_is_not_comparable(gpu_example, arguments, reason):
    verdicts = {drift.verdict for drift in gpu_example.drifts(**arguments)}
    assert verdicts == {f"not comparable: {reason}"}


def test_run_without_profile_has_no_drift():
    assert drifts(None, run_of([5.0] * 10)) == ()


def test_run_without_steps_has_no_drift():
    assert drifts(cpu_profile(), run_of([])) == ()
