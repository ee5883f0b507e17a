from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.evidence.probe import CurvePoint
from autotune.profiles.decide.batch_split import split_global_batch
from autotune.profiles.decide.micro_batch import (
    KNEE_SHARE,
    MicroBatchChoice,
    choose_micro_batch,
    curve_sizes,
    with_headroom,
)

Rates = dict[int, float]
"""Tokens/s including padding by micro-batch size."""
RATES_WITH_KNEE_AT_4 = {1: 50.0, 2: 97.0, 4: 98.5, 8: 100.0}
"""Rates within 2 % of the best from size 4 on."""
RATES_RISING_TO_97 = {1: 50.0, 97: 100.0}
"""Rates that rise up to the largest size."""
RATES_LEVEL_FROM_5 = {1: 90.0, 3: 96.0, 5: 100.0, 9: 100.0}
"""Rates that are level from size 5 on."""
ROUNDING = 1e-9
"""Relative error of times that are computed in another order."""
curves = st.dictionaries(st.integers(1, 40), st.floats(10, 100), min_size=1, max_size=6)
"""Rates by micro-batch size."""


def curve_of(rates: Rates) -> list[CurvePoint]:
    """Return the curve with these rates by micro-batch size."""
    return [
        CurvePoint(size=size, units_per_s=rate, step_s=1.0, timed_steps=4)
        for size, rate in rates.items()
    ]


def relative_step_time(
    rates: Rates, micro_batch_size: int, global_batch_size: int, ranks: int
) -> float:
    """Return the time of a step, by a reference implementation of the prediction.

    It interpolates between the sizes with a rate. The time is that of sequences with a
    single position, which is enough to compare steps.
    """
    split = split_global_batch(global_batch_size, micro_batch_size, ranks)
    sizes = sorted(rates)
    micro_batch_times = [size / rates[size] for size in sizes]
    micro_batch_time = np.interp(split.micro_batch_size, sizes, micro_batch_times)
    return split.gradient_accumulation_steps * micro_batch_time


def choose_of_all_sizes(rates: Rates, global_batch_size: int, ranks: int) -> int:
    """Return the chosen micro-batch size, of all up to the largest with a rate."""
    largest = max(rates)
    choice = choose_micro_batch(
        curve_of(rates),
        largest,
        global_batch_size=global_batch_size,
        ranks=ranks,
        interpolated=True,
    )
    return choice.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceCase:
    """Curve and global batch, with the choice that they lead to."""

    rates: Rates
    feasible_max: int
    global_batch_size: int
    ranks: int = 1
    chosen: int
    reason: str

    def choose(self) -> MicroBatchChoice:
        """Return the choice of this case."""
        return choose_micro_batch(
            curve_of(self.rates),
            self.feasible_max,
            global_batch_size=self.global_batch_size,
            ranks=self.ranks,
        )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            ChoiceCase(
                rates=RATES_WITH_KNEE_AT_4,
                feasible_max=8,
                global_batch_size=800,
                chosen=4,
                reason=(
                    "800 = 200 x 4 (accumulation x micro-batch) is the smallest"
                    " micro-batch within 2% of the shortest predicted step;"
                    " 800 = 100 x 8 would take 1.5% less time; 8 is the largest that"
                    " fits"
                ),
            ),
            id="the largest is hardly faster",
        ),
        pytest.param(
            ChoiceCase(
                rates=RATES_RISING_TO_97,
                feasible_max=100,
                global_batch_size=970,
                ranks=2,
                chosen=97,
                reason=(
                    "970 = 5 x 97 x 2 ranks (accumulation x micro-batch) has the"
                    " shortest predicted step; 100 is the largest that fits, but"
                    " leaves no headroom"
                ),
            ),
            id="the largest with headroom",
        ),
        pytest.param(
            ChoiceCase(
                rates={8: 100.0},
                feasible_max=8,
                global_batch_size=64,
                chosen=8,
                reason=(
                    "64 = 8 x 8 (accumulation x micro-batch) has the shortest"
                    " predicted step; 8 is the largest that fits"
                ),
            ),
            id="the only size",
        ),
        pytest.param(
            ChoiceCase(
                rates=RATES_LEVEL_FROM_5,
                feasible_max=9,
                global_batch_size=65,
                chosen=5,
                reason=(
                    "65 = 13 x 5 (accumulation x micro-batch) is the smallest"
                    " micro-batch within 2% of the shortest predicted step; 65 = 8 x 9"
                    " would take 10.8% more time; 9 is the largest that fits"
                ),
            ),
            id="the largest leaves sequences empty",
        ),
        pytest.param(
            ChoiceCase(
                rates={1: 10.0, 8: 90.0, 9: 100.0},
                feasible_max=9,
                global_batch_size=65,
                chosen=9,
                reason=(
                    "65 = 8 x 9 (accumulation x micro-batch) has the shortest"
                    " predicted step; 9 is the largest that fits"
                ),
            ),
            id="the largest despite empty sequences",
        ),
        pytest.param(
            ChoiceCase(
                rates={1: 20.0, 64: 90.0, 128: 100.0, 417: 100.0},
                feasible_max=430,
                global_batch_size=1024,
                ranks=8,
                chosen=128,
                reason="430 fit; your global batch needs 128 per rank",
            ),
            id="one micro-batch holds the global batch",
        ),
        pytest.param(
            ChoiceCase(
                rates={1: 20.0, 11: 90.0, 14: 100.0},
                feasible_max=15,
                global_batch_size=32,
                chosen=11,
                reason=(
                    "32 = 3 x 11 (accumulation x micro-batch) has the shortest"
                    " predicted step; 15 is the largest that fits, but leaves no"
                    " headroom"
                ),
            ),
            id="the largest is split alike",
        ),
    ],
)
def test_choice_has_its_reason(case):
    choice = case.choose()
    assert choice.micro_batch_size == case.chosen
    assert choice.reason == case.reason


@given(curves, st.integers(1, 500), st.integers(1, 8))
def test_chosen_step_is_within_two_percent(rates, sequences, ranks):
    global_batch_size = max(sequences, ranks)
    chosen = choose_of_all_sizes(rates, sequences, ranks)
    chosen_time = relative_step_time(rates, chosen, global_batch_size, ranks)
    for size in range(1, max(rates) + 1):
        step_time = relative_step_time(rates, size, global_batch_size, ranks)
        assert chosen_time * KNEE_SHARE <= step_time * (1 + ROUNDING)


@given(curves, st.integers(1, 500), st.integers(1, 8))
def test_every_smaller_size_is_slower(rates, sequences, ranks):
    global_batch_size = max(sequences, ranks)
    chosen = choose_of_all_sizes(rates, sequences, ranks)
    sizes = range(1, max(rates) + 1)
    step_times = {
        size: relative_step_time(rates, size, global_batch_size, ranks)
        for size in sizes
    }
    shortest_time = min(step_times.values())
    for size in range(1, chosen):
        assert step_times[size] * KNEE_SHARE >= shortest_time * (1 - ROUNDING)


@given(st.integers(1, 5000), st.floats(0, 0.9))
def test_headroom_leaves_a_size_that_fits(feasible_max, headroom_share):
    assert 1 <= with_headroom(feasible_max, headroom_share) <= feasible_max


def test_choice_was_measured_as_it_is_split():
    # 1,028 sequences in micro-batches of at most 440 are three of 343, and in
    # micro-batches of at most 256 five of 206.
    choice = choose_micro_batch(
        curve_of({206: 90.0, 256: 95.0, 440: 120.0}),
        454,
        global_batch_size=1028,
        ranks=1,
    )
    assert choice.micro_batch_size == 206


def test_first_size_of_the_curve_is_the_split():
    assert curve_sizes(440, 343) == [343, 55, 110, 220, 440, 32, 16, 8, 4, 2, 1]


@given(st.integers(1, 5000), st.data())
def test_sizes_of_curve_differ_and_fit(largest_size, data):
    split_size = data.draw(st.integers(1, largest_size))
    sizes = curve_sizes(largest_size, split_size)
    assert len(sizes) == len(set(sizes))
    assert {1, split_size, largest_size} <= set(sizes)
    assert min(sizes) == 1
    assert max(sizes) == largest_size
