"""Findings of a monitor on losses that stand still or rise.

The medians of both halves of a window of 400 steps are compared whenever half of it is
new. The loss stands still unless it falls by at least two standard errors of their
difference, and rises if it rises by more than four.

The standard error of a median is sqrt(pi / 2) = 1.25 times that of a mean. In the
shortest window, the median of a half is that of ten medians of 20 losses each. With
noise of 0.04, a median of 20 losses has an error of 1.25 x 0.04 / sqrt(20) = 0.011, the
median of ten of them 1.25 x 0.011 / sqrt(10) = 0.0044, and the difference of two halves
sqrt(2) times that: 0.006.
"""

import random

import pytest

from tests.trainer.health.monitors import check, monitor_of
from trainer.formats.train_config import HealthSettings
from trainer.health.findings import Action, Kind

WINDOW_STEPS = 400
HALF_STEPS = WINDOW_STEPS // 2
NOISE = 0.04
"""Standard deviation of noisy losses."""
FALL = 0.03
"""Fall of the loss in half a window: five standard errors."""
RISE = 0.1
"""Rise of the loss in half a window: 16 standard errors."""
SEEDS = range(5)


def trend_findings(losses, **changes):
    """Return step and kind of the findings on plateaus and rises."""
    settings = {"plateau_window_steps": WINDOW_STEPS} | changes
    monitor = monitor_of(**settings)
    findings = []
    for step, loss in enumerate(losses, start=1):
        for finding in check(monitor, step, loss):
            if finding.kind in {Kind.PLATEAU, Kind.RISE}:
                findings.append((step, finding.kind))
    return findings


def noisy_losses(seed, steps, *, start, change):
    """Return losses with noise, which change by ``change`` in half a window."""
    rng = random.Random(seed)
    return [
        start + change * step / HALF_STEPS + rng.gauss(0, NOISE)
        for step in range(steps)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_hide_a_plateau(seed):
    # By chance alone, flat noise looks like a fall now and then, and a plateau is
    # reported again after it. So only the first report counts, which one such fall may
    # delay.
    findings = trend_findings(noisy_losses(seed, 1000, start=2.0, change=0.0))
    at_step, kind = findings[0]
    assert at_step <= WINDOW_STEPS + HALF_STEPS
    assert kind is Kind.PLATEAU


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_hide_a_fall(seed):
    assert trend_findings(noisy_losses(seed, 4000, start=4.0, change=-FALL)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_hide_a_rise(seed):
    losses = noisy_losses(seed, 2 * WINDOW_STEPS, start=2.0, change=RISE)
    # At the end of the first window, and whenever half a window is new.
    assert trend_findings(losses) == [
        (400, Kind.RISE),
        (600, Kind.RISE),
        (800, Kind.RISE),
    ]


@pytest.mark.parametrize(
    ("losses", "at_steps"),
    [
        pytest.param([2.0] * 3000, [400], id="reported once"),
        # Checks are ever further apart, as the window grows with the run.
        pytest.param(
            [2.0] * 1000 + [1.0] * 1000, [400, 1920], id="reported again after a fall"
        ),
        # By 0.01 % in half a window; a change below 0.1 % is no change.
        pytest.param(
            [2 + 1e-6 * step for step in range(400)], [400], id="irrelevant rise"
        ),
    ],
)
def test_plateau_is_reported(losses, at_steps):
    assert trend_findings(losses) == [(step, Kind.PLATEAU) for step in at_steps]


def test_plateau_after_a_rise_is_reported_again():
    # Both values fill whole windows, but for the check at 600, when the second half of
    # the window is higher than the first.
    losses = [2.0] * WINDOW_STEPS + [3.0] * WINDOW_STEPS
    assert trend_findings(losses) == [
        (400, Kind.PLATEAU),
        (600, Kind.RISE),
        (800, Kind.PLATEAU),
    ]


@pytest.mark.parametrize("seed", range(2))
def test_power_law_is_not_a_plateau(seed):
    # The loss of a real run falls ever more slowly: in the last 2,000 of 30,000 steps
    # by 0.009, a fifth of the noise.
    rng = random.Random(seed)
    losses = [1.4 + 9 * step**-0.3 + rng.gauss(0, 0.05) for step in range(1, 30_001)]
    findings = trend_findings(
        losses,
        window_steps=8,  # spikes do not matter here, and a short window is faster
        plateau_window_steps=HealthSettings().plateau_window_steps,
    )
    assert findings == []


def test_only_applied_steps_count():
    monitor = monitor_of(plateau_window_steps=20)
    # Half of these steps were skipped, so the 40th is the 20th that counts.
    for step in range(1, 40):
        assert check(monitor, step, applied=step % 2 == 0) == []
    (plateau,) = check(monitor, 40)
    assert plateau.kind is Kind.PLATEAU


@pytest.fixture
def monitor_before_plateau():
    """A monitor that reports a plateau at the next step, 20."""
    monitor = monitor_of(plateau_window_steps=20)
    for step in range(1, 20):
        assert check(monitor, step, 2.0) == []
    return monitor


def test_plateau_is_only_a_warning(monitor_before_plateau):
    (plateau,) = check(monitor_before_plateau, 20, 2.0)
    assert plateau.kind is Kind.PLATEAU
    assert plateau.action is Action.WARN
    assert monitor_before_plateau.is_rollback_target


def test_plateau_is_reported_with_both_medians(monitor_before_plateau):
    (plateau,) = check(monitor_before_plateau, 20, 2.0)
    assert plateau.values == {
        "first_median": 2.0,
        "second_median": 2.0,
        "improvement": 0.0,
        "error": 0.0,
    }
