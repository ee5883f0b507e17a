import math
import statistics

import pytest

from autotune.evidence.profile import Profile
from autotune.profiles.decide.rates import (
    expected_rate,
    training_rates,
    tuned_rate,
)
from testbed.examples.profiles import but
from tests.autotune.advice.runs import add_evidence

NON_PADDING_SHARE = 0.994
"""Share of non-padding tokens in the profiles of ``add_evidence``."""
PROBED_MICRO_BATCH_SIZE = 64
"""Micro-batch size of the profiles of ``add_evidence``."""


def probed_point(profile: Profile):
    """Return the point of the probe's curve at the profile's micro-batch size."""
    for point in profile.evidence.probe.curve:
        if point.size == PROBED_MICRO_BATCH_SIZE:
            return point
    raise AssertionError(f"no point at micro-batch size {PROBED_MICRO_BATCH_SIZE}")


def test_rates_closest_to_training_come_first():
    profile = add_evidence(probe=True, workers=True, baseline=True)
    rates = training_rates(profile)
    assert [rate.read_from for rate in rates] == ["training", "windows", "steps"]


def test_tuned_rate_is_closest_to_training():
    profile = add_evidence(probe=True, workers=True, baseline=True)
    assert tuned_rate(profile) == training_rates(profile)[0]


def test_profile_without_evidence_has_no_rate():
    assert tuned_rate(add_evidence()) is None


def test_rate_of_probe_counts_non_padding_tokens():
    profile = add_evidence(probe=True)
    point = probed_point(profile)
    interval = tuned_rate(profile).interval
    assert interval.value == pytest.approx(NON_PADDING_SHARE * point.units_per_s)
    assert interval.low == pytest.approx(NON_PADDING_SHARE * point.units_per_s_low)
    assert interval.high == pytest.approx(NON_PADDING_SHARE * point.units_per_s_high)
    assert interval.confidence == 0.95


@pytest.mark.parametrize(
    ("num_workers", "measured_count"),
    [
        pytest.param(2, 2, id="measured, fewer than chosen"),
        pytest.param(4, 4, id="measured, more than chosen"),
        pytest.param(7, 3, id="not measured: the chosen count's"),
    ],
)
def test_rate_of_workers_is_of_the_profiles_count(num_workers, measured_count):
    profile = add_evidence(probe=True, workers=True)
    padded_tokens_per_s_by_count = {
        row.num_workers: row.units_per_s for row in profile.evidence.workers.rows
    }
    data = profile.train.data.model_copy(update={"num_workers": num_workers})
    rate = tuned_rate(but(profile, train={"data": data}))
    mean = statistics.geometric_mean(padded_tokens_per_s_by_count[measured_count])
    assert rate.value == pytest.approx(NON_PADDING_SHARE * mean)


@pytest.fixture
def scaled_profile() -> Profile:
    """Return a profile with a probe of 2 ranks, and a scaling curve from 4 ranks on."""
    return add_evidence(probe=True, network=True)


def test_rate_of_the_probed_ranks_is_the_probes(scaled_profile):
    assert expected_rate(scaled_profile, 2).read_from == "steps"


@pytest.mark.parametrize(("ranks", "known"), [(4, "measured"), (8, "predicted")])
def test_rate_of_more_ranks_is_of_scaling_curve(scaled_profile, ranks, known):
    assert expected_rate(scaled_profile, ranks).known == known


def test_ranks_off_the_scaling_curve_have_no_rate(scaled_profile):
    assert expected_rate(scaled_profile, 5) is None


def test_measured_rate_of_scaling_has_98_percent_bounds(scaled_profile):
    assert expected_rate(scaled_profile, 4).interval.confidence == 0.98


def test_predicted_rate_is_within_its_bounds(scaled_profile):
    interval = expected_rate(scaled_profile, 8).interval
    assert interval.low < interval.value < interval.high


def test_predicted_rate_is_shown_with_95_percent_bounds(scaled_profile):
    predicted = expected_rate(scaled_profile, 8)
    bounds = predicted.interval
    shown_bounds = predicted.estimate.interval()
    normal = statistics.NormalDist()
    # Half-widths of 95 % and 98 % bounds, in standard deviations.
    half_width_95 = normal.inv_cdf(1 - 0.05 / 2)
    half_width_98 = normal.inv_cdf(1 - 0.02 / 2)
    width_98 = math.log(bounds.high / bounds.low)
    # The tolerance is for Student's t, taken at a million degrees of freedom.
    assert math.log(shown_bounds.high / shown_bounds.low) == pytest.approx(
        width_98 * half_width_95 / half_width_98, rel=1e-5
    )
