import random

import pytest

from trainer.config.train_config import HealthSettings
from trainer.health.events import Action, Kind
from trainer.health.monitor import HealthMonitor


def monitor_of(**changes):
    return HealthMonitor(HealthSettings(**changes), 1.0)


def check(monitor, step, loss=2.0, *, applied=True):
    return monitor.check(step, loss=loss, grad_norm=0.5, applied=applied)


def trend_findings(losses, **changes):
    """Return step and kind of the findings on plateaus and rises."""
    monitor = monitor_of(**{"plateau_window_steps": 400} | changes)
    findings = []
    for step, loss in enumerate(losses, start=1):
        for finding in check(monitor, step, loss):
            if finding.kind in {Kind.PLATEAU, Kind.RISE}:
                findings.append((step, finding.kind))
    return findings


SEEDS = range(5)


def noise_of(seed):
    """Return 2 % of noise, with which the error of a half window is 0.005."""
    rng = random.Random(seed)
    return [rng.gauss(0, 0.04) for _ in range(4000)]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_hide_a_plateau(seed):
    # By chance alone, flat noise looks like a fall now and then, and a plateau is
    # reported again after it.
    findings = trend_findings([2 + noise for noise in noise_of(seed)[:1000]])
    at_step, kind = findings[0]
    assert at_step <= 600
    assert kind is Kind.PLATEAU


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_hide_a_fall(seed):
    # By 0.03 in half a window.
    losses = [4 - 0.00015 * step + noise for step, noise in enumerate(noise_of(seed))]
    assert trend_findings(losses) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_does_not_hide_a_rise(seed):
    losses = [
        2 + 0.0005 * step + noise for step, noise in enumerate(noise_of(seed)[:800])
    ]
    assert trend_findings(losses) == [
        (400, Kind.RISE),
        (600, Kind.RISE),
        (800, Kind.RISE),
    ]


@pytest.mark.parametrize(
    ("losses", "at_steps"),
    [
        pytest.param([2.0] * 3000, [400], id="reported once"),
        pytest.param(
            [2.0] * 1000 + [1.0] * 1000, [400, 1920], id="reported again after a fall"
        ),
        pytest.param(
            [2 + 1e-6 * step for step in range(400)], [400], id="irrelevant rise"
        ),
    ],
)
def test_plateau_is_reported(losses, at_steps):
    assert trend_findings(losses) == [(step, Kind.PLATEAU) for step in at_steps]


@pytest.mark.parametrize("seed", range(2))
def test_power_law_is_not_a_plateau(seed):
    # The gain of the last 2,000 steps, 0.009, is a fifth of the noise.
    rng = random.Random(seed)
    losses = [1.4 + 9 * step**-0.3 + rng.gauss(0, 0.05) for step in range(1, 30_001)]
    findings = trend_findings(
        losses,
        window_steps=8,  # spikes do not matter here, and a short window is faster
        plateau_window_steps=HealthSettings().plateau_window_steps,
    )
    assert findings == []


def test_plateau_is_a_warning_with_both_medians():
    monitor = monitor_of(plateau_window_steps=20)
    # Only steps that were applied count.
    for step in range(1, 40):
        assert check(monitor, step, applied=step % 2 == 0) == []
    (plateau,) = check(monitor, 40)
    assert (plateau.kind, plateau.action) == (Kind.PLATEAU, Action.WARN)
    assert monitor.calm
    assert plateau.values == {
        "first_median": 2.0,
        "second_median": 2.0,
        "improvement": 0.0,
        "error": 0.0,
    }
