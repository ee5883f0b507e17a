"""Drift of a run's non-padding tokens/s from its profile."""

import pytest

from autotune.evidence.profile import Profile
from autotune.profiles.decide.drift import Drift, drifts
from autotune.profiles.decide.rates import Rate, tuned_rate
from testbed.examples.profiles import example_profile as cpu_profile
from tests.autotune.advice.runs import add_evidence, noisy, run_of
from trainer.formats.run_record import Run


def speed_drift(profile: Profile, run: Run, **arguments) -> Drift:
    """Return the drift of non-padding tokens/s."""
    speed, _, _ = drifts(profile, run, **arguments)
    return speed


@pytest.fixture
def tuned_profile() -> Profile:
    """Return a profile with a probe, a worker sweep and a baseline."""
    return add_evidence(probe=True, workers=True, baseline=True)


@pytest.fixture
def scaled_profile() -> Profile:
    """Return a profile with a probe of 2 ranks and a scaling curve."""
    return add_evidence(probe=True, network=True)


def run_with_factor(expected: Rate, factor: float) -> Run:
    """Return a run with hardly any noise at a factor of the expected rate."""
    rate = factor * expected.value
    # Two slow steps, which do not count: the first 4 of 40 steps are warm-up.
    warm_up = [0.2 * rate] * 2
    settled = [rate * (1 + 0.001 * (step % 3)) for step in range(38)]
    return run_of(warm_up + settled)


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        pytest.param(1.0, "as expected", id="same"),
        pytest.param(0.9, "drift: slower, beyond noise", id="slower"),
        pytest.param(1.1, "drift: faster, beyond noise", id="faster"),
    ],
)
def test_drift_beyond_noise_is_named(tuned_profile, factor, verdict):
    run = run_with_factor(tuned_rate(tuned_profile), factor)
    speed = speed_drift(tuned_profile, run)
    assert speed.verdict == verdict
    # Settled steps are up to 0.2 % faster than the factor.
    assert speed.ratio.value == pytest.approx(factor, rel=0.002)
    assert speed.ratio.low < speed.ratio.value < speed.ratio.high


@pytest.mark.parametrize("factor", [1.0, 0.9, 1.1], ids=["same", "slower", "faster"])
def test_drift_is_shown_with_95_percent_bounds(tuned_profile, factor):
    run = run_with_factor(tuned_rate(tuned_profile), factor)
    speed = speed_drift(tuned_profile, run)
    for interval in (speed.ratio, speed.expected, speed.achieved):
        assert interval.confidence == 0.95


def test_drift_from_a_prediction_has_its_confidence(scaled_profile):
    rates = noisy(seed=2, n=200, autocorrelation=0.0, noise=0.01, mean=1e5)
    speed = speed_drift(scaled_profile, run_of(rates, ranks=8))
    assert speed.expected.confidence == 0.98
    assert speed.ratio.confidence == 0.95
    assert speed.expected_source.startswith("predicted")


def test_unknown_ranks_have_no_expected_rate():
    speed = speed_drift(add_evidence(probe=True), run_of([5.0] * 10, ranks=7))
    assert speed.expected is None
    assert speed.ratio is None
    assert speed.verdict == "no expected value"
    assert speed.expected_source == "no rate is known for 7 ranks"


def test_run_without_profile_has_no_drift():
    assert drifts(None, run_of([5.0] * 10)) == ()


def test_run_without_steps_has_no_drift():
    assert drifts(cpu_profile(), run_of([])) == ()
