import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import BadInput
from autotune.memory.values import CurvePoint
from autotune.profiles.decide.batch_split import (
    choose_micro_batch,
    curve_sizes,
    global_batch_size_of,
    knee_interval,
    split_global_batch,
    with_headroom,
)


def curve_of(rates: dict[int, float]) -> list[CurvePoint]:
    """Return the curve with these rates by micro-batch size."""
    return [
        CurvePoint(
            micro_batch_size=size, padded_tokens_per_s=rate, step_s=1.0, timed_steps=4
        )
        for size, rate in rates.items()
    ]


KNEE = {1: 50.0, 2: 97.0, 4: 98.5, 8: 100.0}
RISING = {1: 50.0, 97: 100.0}
LEVEL = {1: 90.0, 3: 96.0, 5: 100.0, 9: 100.0}


@pytest.mark.parametrize(
    ("rates", "feasible_max", "global_batch_size", "ranks", "chosen", "reason"),
    [
        (
            KNEE,
            8,
            800,
            1,
            4,
            (
                "800 = 200 x 4 (accumulation x micro-batch) is the smallest"
                " micro-batch within 2% of the shortest predicted step; 800 = 100 x 8"
                " would take 1.5% less time; 8 is the largest that fits"
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
                "64 = 8 x 8 (accumulation x micro-batch) has the shortest predicted"
                " step; 8 is the largest that fits"
            ),
        ),
        # Empty sequences of the last micro-batch count.
        (LEVEL, 9, 65, 1, 5, ""),
        ({1: 10.0, 8: 90.0, 9: 100.0}, 9, 65, 1, 9, ""),
        (
            {1: 20.0, 64: 90.0, 128: 100.0, 417: 100.0},
            430,
            1024,
            8,
            128,
            "430 fit; your global batch needs 128 per rank",
        ),
        pytest.param(
            {1: 20.0, 11: 90.0, 14: 100.0},
            15,
            32,
            1,
            11,
            (
                "32 = 3 x 11 (accumulation x micro-batch) has the shortest predicted"
                " step; 15 is the largest that fits, but leaves no headroom"
            ),
            id="the largest is split alike",
        ),
    ],
)
def test_chosen_micro_batch_has_its_reason(
    rates, feasible_max, global_batch_size, ranks, chosen, reason
):
    choice = choose_micro_batch(
        curve_of(rates),
        feasible_max,
        global_batch_size=global_batch_size,
        ranks=ranks,
    )
    assert choice.micro_batch_size == chosen
    assert choice.reason.endswith(reason)


@given(
    st.dictionaries(st.integers(1, 40), st.floats(10, 100), min_size=1, max_size=6),
    st.integers(1, 500),
    st.integers(1, 8),
)
def test_chooses_the_smallest_split_within_two_percent(rates, global_batch_size, ranks):
    sizes = sorted(rates)
    seconds = [size / rates[size] for size in sizes]
    candidates = range(1, sizes[-1] + 1)

    def step_s(size):
        split = split_global_batch(max(global_batch_size, ranks), size, ranks)
        micro_batch_s = np.interp(split.micro_batch_size, sizes, seconds)
        return split.gradient_accumulation_steps * micro_batch_s

    chosen = choose_micro_batch(
        curve_of(rates),
        sizes[-1],
        global_batch_size=global_batch_size,
        ranks=ranks,
        sizes=candidates,
    ).micro_batch_size
    shortest_s = min(step_s(size) for size in candidates)
    assert step_s(chosen) * 0.98 <= shortest_s * (1 + 1e-9)
    assert all(
        step_s(size) * 0.98 >= shortest_s * (1 - 1e-9) for size in range(1, chosen)
    )


@given(st.integers(1, 5000), st.floats(0, 0.9))
def test_headroom_leaves_a_size_that_fits(feasible_max, headroom_share):
    assert 1 <= with_headroom(feasible_max, headroom_share) <= feasible_max


@given(st.integers(1, 5000))
def test_curve_ascends_to_the_largest_size(largest_size):
    sizes = curve_sizes(largest_size)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest_size


@given(st.integers(1, 10**8), st.floats(1, 512))
def test_global_batch_is_met_to_half_a_sequence(tokens, tokens_per_sequence):
    sequences = global_batch_size_of(tokens, tokens_per_sequence)
    difference = abs(sequences * tokens_per_sequence - tokens)
    assert sequences == 1 or difference <= tokens_per_sequence / 2 + 1e-6


def test_split_counts_empty_sequences():
    split = split_global_batch(97, 16, 4)
    assert split.gradient_accumulation_steps == 2
    assert split.micro_batch_size == 13
    assert split.empty_sequences == 7
    assert split.without_empty == (96, 104)


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "ranks", "words"),
    [
        (1028, 257, 1, "1,028 = 4 x 257"),
        (1028, 348, 1, "1,028 = 3 x 343"),
        (97, 16, 4, "97 = 2 x 13 x 4 ranks"),
    ],
)
def test_split_has_one_notation(global_batch_size, micro_batch_size, ranks, words):
    split = split_global_batch(global_batch_size, micro_batch_size, ranks)
    assert split.words(ranks) == words


def test_even_split_has_no_better_batch():
    assert split_global_batch(128, 16, 4).without_empty == ()


@given(st.integers(1, 64), st.integers(1, 600), st.integers(1, 64))
def test_rejects_fewer_sequences_than_ranks(missing, micro_batch_size, ranks):
    global_batch_size = ranks - missing
    with pytest.raises(BadInput, match="is too small for"):
        split_global_batch(global_batch_size, micro_batch_size, ranks)


@given(st.integers(0, 5000), st.integers(1, 600), st.integers(1, 64))
def test_split_keeps_every_sequence(more, micro_batch_size, ranks):
    global_batch_size = ranks + more
    split = split_global_batch(global_batch_size, micro_batch_size, ranks)
    assert split.micro_batch_size <= micro_batch_size
    micro_batches = split.gradient_accumulation_steps * ranks
    positions = micro_batches * split.micro_batch_size
    assert positions - split.empty_sequences == global_batch_size
    for batch_without_empty in split.without_empty:
        assert batch_without_empty % micro_batches == 0


def noisy_curve(bounds: dict[int, tuple[float, float]]) -> list[CurvePoint]:
    """Return the curve with these bounds of rates by micro-batch size."""
    return [
        CurvePoint(
            micro_batch_size=size,
            padded_tokens_per_s=(low * high) ** 0.5,
            padded_tokens_per_s_low=low,
            padded_tokens_per_s_high=high,
            step_s=1.0,
            timed_steps=4,
        )
        for size, (low, high) in bounds.items()
    ]


@pytest.mark.parametrize(
    ("curve", "knee"),
    [
        # Noise hides it.
        (noisy_curve({1: (40, 60), 2: (90, 99), 4: (97, 101), 8: (99, 100)}), (2, 8)),
        (noisy_curve({1: (50, 51), 2: (99.5, 99.9), 4: (100, 100.4)}), (2, 2)),
        # Without a spread there is no interval.
        (curve_of({1: 50.0, 2: 100.0}), None),
        ([], None),
    ],
)
def test_knee_interval_contains_noise(curve, knee):
    assert knee_interval(curve) == knee
