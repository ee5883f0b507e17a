import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import BadInput
from autotune.memory.values import CurvePoint
from autotune.profiles.decide import batch_split
from autotune.profiles.decide.batch_split import (
    choose_micro_batch,
    curve_sizes,
    global_batch_size_of,
    knee_interval,
    split_global_batch,
)


def _curve(speeds: dict[int, float]) -> list[CurvePoint]:
    return [
        CurvePoint(
            micro_batch_size=rows, padded_tokens_per_s=speed, step_s=1.0, timed_steps=4
        )
        for rows, speed in speeds.items()
    ]


KNEE = {1: 50.0, 2: 97.0, 4: 98.5, 8: 100.0}
RISING = {1: 50.0, 97: 100.0}
LEVEL = {1: 90.0, 3: 96.0, 5: 100.0, 9: 100.0}


@pytest.mark.parametrize(
    ("speeds", "limit", "global_batch_size", "ranks", "chosen", "reason"),
    [
        (
            KNEE,
            8,
            800,
            1,
            4,
            (
                "micro-batch size 4 x 200 accumulation steps is the smallest split"
                " within 2% of the shortest predicted step; 8 x 100 would take 1.5%"
                " less time; 8 is the largest that fits"
            ),
        ),
        (
            RISING,
            100,
            970,
            2,
            97,
            "100 is the largest that fits, but leaves no headroom",
        ),
        (
            {8: 100.0},
            8,
            64,
            1,
            8,
            (
                "8 x 8 accumulation steps has the shortest predicted step; 8 is the"
                " largest that fits"
            ),
        ),
        (LEVEL, 9, 65, 1, 5, ""),  # empty rows of the last micro-batch count
        ({1: 10.0, 8: 90.0, 9: 100.0}, 9, 65, 1, 9, ""),
        (
            {1: 20.0, 64: 90.0, 128: 100.0, 417: 100.0},
            430,
            1024,
            8,
            128,
            "430 fit; your global batch needs 128 per GPU",
        ),
    ],
)
def test_the_micro_batch_that_is_chosen_says_why(
    speeds, limit, global_batch_size, ranks, chosen, reason
):
    choice = choose_micro_batch(
        _curve(speeds), limit, global_batch_size=global_batch_size, ranks=ranks
    )
    assert choice.micro_batch_size == chosen
    assert choice.reason.endswith(reason)


@given(
    st.dictionaries(st.integers(1, 40), st.floats(10, 100), min_size=1, max_size=6),
    st.integers(1, 500),
    st.integers(1, 8),
)
def test_the_smallest_split_is_chosen_that_none_is_predicted_to_beat_by_two_per_cent(
    speeds, global_batch_size, ranks
):
    curve, limit = _curve(speeds), max(speeds)
    points = sorted(speeds)
    seconds = [rows / speeds[rows] for rows in points]

    def step_s(rows):
        split = split_global_batch(max(global_batch_size, ranks), rows, ranks)
        return split.gradient_accumulation_steps * np.interp(
            split.micro_batch_size, points, seconds
        )

    asked = {
        "global_batch_size": global_batch_size,
        "ranks": ranks,
        "sizes": range(1, limit + 1),
    }
    chosen = choose_micro_batch(curve, limit, **asked).micro_batch_size
    least = min(step_s(rows) for rows in range(1, limit + 1))
    assert step_s(chosen) * 0.98 <= least * (1 + 1e-9)
    assert all(step_s(rows) * 0.98 >= least * (1 - 1e-9) for rows in range(1, chosen))


@given(
    st.integers(1, 5000), st.floats(0, 0.9), st.integers(1, 10**8), st.floats(1, 512)
)
def test_headroom_asks_for_no_more_than_fits_nor_for_nothing_the_curve_ascends_to_it_and_the_batch_is_met_to_half_a_row(
    feasible_max, headroom, tokens, per_row
):
    limit = batch_split.with_headroom(feasible_max, headroom)
    assert 1 <= limit <= feasible_max
    rows = curve_sizes(limit)
    assert rows == sorted(set(rows))
    assert rows[-1] == limit
    met = global_batch_size_of(tokens, per_row)
    assert met == 1 or abs(met * per_row - tokens) <= per_row / 2 + 1e-6


@given(st.integers(1, 5000), st.integers(1, 600), st.integers(1, 64))
def test_no_row_of_a_global_batch_is_lost_none_exceeds_the_micro_batch_and_the_nearest_even_batches_are_named(
    rows, micro_batch, ranks
):
    dealing = split_global_batch(97, 16, 4)
    assert (
        dealing.gradient_accumulation_steps,
        dealing.micro_batch_size,
        dealing.empty_sequences,
    ) == (2, 13, 7)
    assert dealing.without_empty == (96, 104)
    assert split_global_batch(128, 16, 4).without_empty == ()
    if rows < ranks:
        with pytest.raises(BadInput, match="is too small for"):
            split_global_batch(rows, micro_batch, ranks)
        return
    dealing = split_global_batch(rows, micro_batch, ranks)
    assert dealing.micro_batch_size <= micro_batch
    assert (
        dealing.gradient_accumulation_steps * dealing.micro_batch_size * ranks
        - dealing.empty_sequences
        == rows
    )
    for near in dealing.without_empty:
        assert near % (dealing.gradient_accumulation_steps * ranks) == 0


def _noisy(bounds: dict[int, tuple[float, float]]) -> list[CurvePoint]:
    curve = _curve({rows: (low * high) ** 0.5 for rows, (low, high) in bounds.items()})
    names = ("padded_tokens_per_s_low", "padded_tokens_per_s_high")
    return [
        point.model_copy(
            update=dict(zip(names, bounds[point.micro_batch_size], strict=True))
        )
        for point in curve
    ]


@pytest.mark.parametrize(
    ("curve", "knee"),
    [
        # Noise hides it.
        (_noisy({1: (40, 60), 2: (90, 99), 4: (97, 101), 8: (99, 100)}), (2, 8)),
        (_noisy({1: (50, 51), 2: (99.5, 99.9), 4: (100, 100.4)}), (2, 2)),
        (_curve({1: 50.0, 2: 100.0}), None),  # without a spread there is no interval
        ([], None),
    ],
)
def test_the_knee_lies_between_two_sizes_as_far_as_noise_tells(curve, knee):
    assert knee_interval(curve) == knee
