"""Verdicts on an achieved rate, compared with the expected one."""

import math

import numpy as np
import pytest

from autotune.base.estimates import Estimate, estimate_single
from autotune.base.step_statistics import estimate_steps
from autotune.base.window_statistics import estimate_windows
from autotune.profiles.decide.drift import verdict_of
from tests.autotune.advice.runs import noisy

EXPECTED_TOKENS_PER_S = 100.0
"""Rate of the simulated windows, which the runs are compared with."""
STEP_NOISE = 0.05
"""Standard deviation of the logarithm of a step's rate."""
WINDOW_NOISE = 0.015
"""Standard deviation of the logarithm of a window's rate."""
RUNS = 200
"""Simulated runs of each case."""
LUCK_STANDARD_ERRORS = 2.6
"""Standard errors that a share of runs may be above its mean by chance: once in 200
times."""


def windows_around(tokens_per_s: float) -> Estimate:
    """Return the estimate of 15 windows with hardly any noise."""
    spread = [tokens_per_s, tokens_per_s + 0.01, tokens_per_s - 0.01]
    return estimate_windows(spread * 5)


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
    ("steps", "autocorrelation"),
    # The more neighbouring steps are alike, the more steps it takes.
    [(60, 0.0), (120, 0.5), (400, 0.8)],
)
def test_a_tenth_slower_is_drift(steps, autocorrelation):
    verdicts = verdicts_of_runs(steps, autocorrelation, achieved_share=0.9)
    # Required: these runs are long enough for 19 of 20 to be decided.
    assert share_of(verdicts, "drift") >= 0.95
    assert share_of(verdicts, "noise unknown") <= 0.05


def test_run_too_short_for_its_variation_is_undecided():
    # 60 such steps tell as much as a single independent one: 60 x 0.03 / 1.97.
    verdicts = verdicts_of_runs(60, autocorrelation=0.97, achieved_share=0.9)
    # Most are undecided, and only a minority is called drift by chance.
    assert share_of(verdicts, "drift") < 0.3
    assert share_of(verdicts, "noise unknown") > 0.5


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
