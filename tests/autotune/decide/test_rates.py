import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decide.rates import expected_rate, fill_share, run_rate, settled_steps, training_rates, tuned_rate
from tests.autotune.decide.runs import TOKENS, noisy, run_of, with_evidence


def test_what_comes_closest_to_training_is_taken():
    every = training_rates(with_evidence(probe=True, workers=True, baseline=True))
    assert [rate.read_from for rate in every] == ["training", "windows", "steps"]
    assert tuned_rate(with_evidence(probe=True, workers=True)).read_from == "windows"
    assert tuned_rate(with_evidence()) is None


def test_a_rate_of_slots_counts_what_holds_tokens():
    profile = with_evidence(probe=True)
    point = next(point for point in profile.evidence.probe.curve if point.rows == 64)
    rate = tuned_rate(profile)
    assert fill_share(profile) == pytest.approx(0.994)
    assert rate.value == pytest.approx(0.994 * point.slot_tokens_per_s)
    assert (rate.interval.low, rate.interval.high) == pytest.approx(
        (0.994 * point.slot_tokens_per_s_low, 0.994 * point.slot_tokens_per_s_high)
    )
    assert rate.interval.confidence == 0.95


def test_windows_are_those_of_the_profiles_own_workers_and_else_of_the_chosen_ones():
    profile = with_evidence(probe=True, workers=True)
    by_count = {row.loader_workers: row for row in profile.evidence.workers.rows}

    def with_workers(count):
        data = profile.train.data.model_copy(update={"loader_workers": count})
        return profile.model_copy(update={"train": profile.train.model_copy(update={"data": data})})

    for count, measured in ((2, 2), (4, 4), (7, 3)):
        windows = by_count[measured].slot_tokens_per_s
        middle = math.exp(sum(map(math.log, windows)) / len(windows))
        assert tuned_rate(with_workers(count)).value == pytest.approx(0.994 * middle)


def test_other_numbers_of_ranks_are_read_from_the_scaling_curve_with_the_bounds_of_the_links():
    profile = with_evidence(probe=True, network=True)
    assert expected_rate(profile, 2).read_from == "steps"
    measured, predicted = expected_rate(profile, 4), expected_rate(profile, 8)
    assert (measured.known, predicted.known) == ("measured", "predicted")
    assert (measured.interval.confidence, predicted.interval.confidence) == (0.98, 0.98)
    assert predicted.interval.low < predicted.value < predicted.interval.high
    own = predicted.estimate.interval()  # of 95 %, which is 1.960 standard deviations for 2.326
    assert math.log(own.high / own.low) == pytest.approx(
        math.log(predicted.interval.high / predicted.interval.low) * 1.960 / 2.326, 1e-3
    )
    assert expected_rate(profile, 5) is None


def test_the_first_steps_do_not_count_nor_do_earlier_starts():
    run = run_of([1.0] * 20 + [50.0] * 2 + [100.0] * 18, resumed_step=20)
    assert [row.step for row in settled_steps(run)] == list(range(23, 41))
    assert run_rate(run).value == pytest.approx(100.0)
    assert len(settled_steps(run_of([1.0] * 1000))) == 980


def test_a_rate_is_all_tokens_over_all_seconds():
    run = run_of([1.0] + [50.0, 200.0] * 5)
    settled = settled_steps(run)
    assert run_rate(run).value == pytest.approx(TOKENS * len(settled) / sum(row.step_s for row in settled))


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_the_interval_of_a_run_holds_its_true_rate_and_is_no_wider_than_its_noise_makes_it(memory):
    n, noise, runs = 250, 0.05, 80
    held, widths = 0, []
    for seed in range(runs):
        rate = run_rate(run_of(noisy(seed, n, memory=memory, noise=noise, mean=100.0)))
        held += rate.interval.low <= 100.0 <= rate.interval.high
        widths.append(math.log(rate.interval.high / rate.interval.low))
    assert held / runs >= 0.95 - 2.6 * math.sqrt(0.05 * 0.95 / runs)
    true_half = 1.96 * noise * math.sqrt((1 + memory) / (1 - memory) / (0.95 * n))
    assert true_half < sum(widths) / runs / 2 < 1.6 * true_half


@given(st.floats(0.01, 0.1), st.floats(1.5, 4), st.floats(1, 1e6))
def test_twice_the_noise_is_twice_the_interval_whatever_the_speed(noise, times, mean):
    def half(spread):
        pattern = [mean * math.exp(spread * (-1) ** (step * step // 3)) for step in range(200)]
        rate = run_rate(run_of(pattern))
        return math.log(rate.interval.high / rate.interval.low)

    assert half(times * noise) / half(noise) == pytest.approx(times, rel=0.05)


@pytest.mark.parametrize(("steps", "bound"), [(50, pytest.approx(100.0)), (1, None)])
def test_a_run_without_noise_has_an_interval_without_width_and_a_short_one_has_none(steps, bound):
    rate = run_rate(run_of([100.0] * steps))
    assert (rate.value, rate.interval.low, rate.interval.high) == (pytest.approx(100.0), bound, bound)


@pytest.mark.parametrize("rates", [[], [math.nan] * 5])
def test_a_run_that_logged_no_figures_has_no_rate(rates):
    assert run_rate(run_of(rates)) is None
