"""Splits to confirm, and the choice that their windows make."""

import random

import pytest

from autotune.base.window_statistics import predict_window
from autotune.confirm.decide import (
    confirm_window_s,
    fastest_split,
    is_precise,
    micro_batches_of_window,
    promise,
    rivals,
)
from autotune.evidence.probe import CurvePoint
from autotune.profiles.decide.micro_batch import measured_splits

STEADY_RATES = [1000.0, 1001.0, 999.0, 1000.5]


def curve_of(rates):
    """Return a curve with these rates by micro-batch size, of sequences of 512."""
    return [
        CurvePoint(
            size=size,
            units_per_s=rate,
            step_s=512 * size / rate,
            timed_steps=4,
        )
        for size, rate in rates.items()
    ]


def rivals_of(rates, chosen_size, global_batch_size=1024):
    """Return the rivals of a size on a curve with these rates."""
    steps = measured_splits(
        curve_of(rates), global_batch_size=global_batch_size, ranks=1
    )
    return rivals(steps, chosen_size)


def scaled(rates, factor):
    """Return rates that are faster by a factor."""
    return [factor * rate for rate in rates]


def test_only_nearly_as_fast_splits_are_rivals():
    rates = {32: 50.0, 64: 97.0, 128: 96.0, 256: 100.0}
    assert rivals_of(rates, chosen_size=256) == [64, 128]


def test_size_that_no_split_has_is_no_rival():
    # 1,028 sequences in micro-batches of at most 256 are five of 206.
    rates = {206: 99.0, 256: 100.0, 343: 100.0}
    assert rivals_of(rates, chosen_size=343, global_batch_size=1028) == [206]


def test_choice_without_curve_has_no_rivals():
    assert rivals_of({}, chosen_size=8) == []


@pytest.mark.parametrize(
    ("accumulation_steps", "micro_batches"), [(3, 3), (10, 10), (64, 20)]
)
def test_window_has_whole_steps_up_to_ten_seconds(accumulation_steps, micro_batches):
    curve = curve_of({1: 1024.0})
    assert micro_batches_of_window(accumulation_steps, 1, curve) == micro_batches


def test_slow_window_has_four_micro_batches():
    assert micro_batches_of_window(64, 1, curve_of({1: 5.0})) == 4


def test_surely_faster_split_is_used():
    rates = {343: STEADY_RATES, 64: scaled(STEADY_RATES, 1.1)}
    assert fastest_split(rates, 343) == 64


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.01])
def test_choice_stays_unless_another_is_worth_it(factor):
    rates = {343: STEADY_RATES, 64: scaled(STEADY_RATES, factor)}
    assert fastest_split(rates, 343) == 343


def test_choice_stays_if_noise_hides_the_difference():
    rates = {343: STEADY_RATES, 64: [700.0, 1500.0, 1200.0, 1100.0]}
    assert fastest_split(rates, 343) == 343


def test_promise_covers_one_further_process():
    generator = random.Random(1)
    covered = 0
    for _ in range(1000):
        *measured, further = (generator.lognormvariate(7, 0.01) for _ in range(5))
        bounds = promise({8: measured}, 8).interval()
        covered += bounds.low <= further <= bounds.high
    # 95 % of 1,000, give or take four standard deviations.
    assert covered == pytest.approx(950, abs=28)


def test_rivals_narrow_the_promise():
    alone = promise({8: STEADY_RATES}, 8)
    together = promise({8: STEADY_RATES, 16: scaled(STEADY_RATES, 0.9)}, 8)
    assert together.degrees_of_freedom > alone.degrees_of_freedom


def test_three_steady_windows_are_precise():
    assert is_precise(predict_window(STEADY_RATES[:3]))


@pytest.mark.parametrize("rates", [[1000.0, 1001.0], [900.0, 1000.0, 1100.0]])
def test_few_or_noisy_windows_are_not_precise(rates):
    assert not is_precise(predict_window(rates))


@pytest.mark.parametrize(
    ("window_s", "confirmed_s"), [(0.5, 2.5), (2.0, 10.0), (4.0, 10.0), (30.0, 30.0)]
)
def test_windows_are_longer_up_to_ten_seconds(window_s, confirmed_s):
    assert confirm_window_s(window_s) == confirmed_s
