import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.evidence import CurvePoint
from autotune.decide.choose import (
    choose_micro_batch,
    choose_predicted,
    choose_untimed,
    curve_rows,
    deal,
    global_batch_rows,
    knee_interval,
    rows_with_headroom,
)
from autotune.errors import BadInput


def _curve(speeds: dict[int, float]) -> list[CurvePoint]:
    return [CurvePoint(rows=rows, slot_tokens_per_s=speed, step_s=1.0, timed_steps=4) for rows, speed in speeds.items()]


def test_a_size_that_was_not_timed_has_no_knee():
    assert knee_interval([]) is None
    assert choose_untimed(33).rows == 33


def test_the_smallest_micro_batch_within_two_per_cent_of_the_best_is_chosen():
    choice = choose_micro_batch(_curve({1: 50.0, 2: 97.0, 4: 98.5, 8: 100.0}), feasible_max=8)
    assert choice.rows == 4
    assert "98.5%" in choice.reason
    assert "8 rows" in choice.reason


def test_a_rising_curve_is_followed_to_the_headroom():
    choice = choose_micro_batch(_curve({1: 50.0, 97: 100.0}), feasible_max=100)
    assert choice.rows == 97
    assert "leaves the headroom below the 100 that fit" in choice.reason
    assert "the largest that fits" in choose_micro_batch(_curve({8: 100.0}), feasible_max=8).reason


@given(st.integers(1, 5000), st.floats(0, 0.9))
def test_headroom_never_asks_for_more_than_fits_nor_for_nothing(feasible_max, headroom):
    assert 1 <= rows_with_headroom(feasible_max, headroom) <= feasible_max


@given(st.integers(1, 5000))
def test_the_curve_ascends_to_its_limit(limit):
    rows = curve_rows(limit)
    assert rows == sorted(set(rows))
    assert rows[-1] == limit


@given(st.integers(1, 10**8), st.floats(1, 512))
def test_the_global_batch_is_met_to_half_a_row(tokens, per_row):
    rows = global_batch_rows(tokens, per_row)
    assert rows == 1 or abs(rows * per_row - tokens) <= per_row / 2 + 1e-6


def test_a_global_batch_is_dealt_exactly_and_the_nearest_even_ones_are_named():
    dealing = deal(97, 16, 4)
    assert (dealing.micro_batches, dealing.rows_per_micro_batch, dealing.empty_rows) == (2, 13, 7)
    assert dealing.without_empty == (96, 104)
    assert deal(128, 16, 4).without_empty == ()


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 64))
def test_no_row_of_a_global_batch_is_lost_or_repeated_and_none_exceeds_the_micro_batch(rows, micro_batch, ranks):
    if rows < ranks:
        with pytest.raises(BadInput, match="without a row"):
            deal(rows, micro_batch, ranks)
        return
    dealing = deal(rows, micro_batch, ranks)
    assert dealing.rows_per_micro_batch <= micro_batch
    assert dealing.micro_batches * dealing.rows_per_micro_batch * ranks - dealing.empty_rows == rows
    for near in dealing.without_empty:
        assert near % (dealing.micro_batches * ranks) == 0


def _noisy(speeds: dict[int, tuple[float, float]]) -> list[CurvePoint]:
    return [
        CurvePoint(
            rows=rows, slot_tokens_per_s=(low * high) ** 0.5, step_s=1.0, timed_steps=4,
            slot_tokens_per_s_low=low, slot_tokens_per_s_high=high,
        )
        for rows, (low, high) in speeds.items()
    ]  # fmt: skip


def test_the_knee_lies_between_two_sizes_when_noise_hides_it():
    assert knee_interval(_noisy({1: (40, 60), 2: (90, 99), 4: (97, 101), 8: (99, 100)})) == (2, 8)


def test_a_clear_knee_is_one_size():
    assert knee_interval(_noisy({1: (50, 51), 2: (99.5, 99.9), 4: (100, 100.4)})) == (2, 2)


def test_without_a_spread_there_is_no_interval():
    assert knee_interval(_curve({1: 50.0, 2: 100.0})) is None


@given(least=st.integers(0, 2000), more=st.integers(0, 500), headroom=st.floats(0, 0.9))
def test_of_a_prediction_the_lower_end_is_taken_less_the_headroom(least, more, headroom):
    chosen = choose_predicted(least, least + more, headroom)
    assert chosen.rows == rows_with_headroom(least, headroom) <= max(1, least)
    assert "not probed" in chosen.reason
    assert "knee of throughput is not measured" in chosen.reason


def test_a_prediction_says_its_range_and_where_not_even_one_row_is_sure():
    assert "the least of 416 to 444 rows that are predicted to fit, less 3 % headroom" in (
        choose_predicted(416, 444, 0.03).reason
    )
    assert choose_predicted(416, 444, 0.03).rows == 403
    unsure = choose_predicted(0, 3, 0.03)
    assert unsure.rows == 1
    assert "not even that is predicted to fit" in unsure.reason
