import math
import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.events import Action, Kind
from trainer.health import centre_and_scatter, level_and_scatter, median_and_error, middle
from trainer.meter import ROWS, STARVED_SHARE, STRAGGLER_RATIO, PaceMonitor

FINE = [1.0, 1.0, 1.0, 1.0]


def told(rows):
    """Number, counted from 1, and kind of what is said of rows of (waits, compute)."""
    pace = PaceMonitor()
    return [
        (number, one.kind)
        for number, (waits, compute) in enumerate(rows, start=1)
        for one in pace.look(step_s=1.0, data_wait_s=waits, compute_s=compute)
    ]


def waiting(share, rows):
    return [([0.0, share, 0.0, 0.0], FINE)] * rows


def slow(ratio, rows):
    return [([0.0] * 4, [1.0, 1.0, ratio, 1.0])] * rows


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (waiting(0.0, ROWS) + waiting(0.2, 50), [(2 * ROWS, Kind.STARVED)]),
        (waiting(0.9, ROWS) + waiting(0.0, 50), []),
        (waiting(0.9, 50), [(2 * ROWS, Kind.STARVED)]),
    ],
    ids=["later", "in the first rows", "always"],
)
def test_a_loader_that_starves_a_rank_is_said_once_and_not_of_the_first_rows(rows, found):
    assert told(rows) == found


@pytest.mark.parametrize(
    ("rows", "step_s", "waits", "compute", "kind", "values", "message", "next_steps"),
    [
        (2 * ROWS, 2.0, [0.0, 0.1, 0.5], [None] * 3, Kind.STARVED,
         {"rank": 2.0, "share": 0.25, "data_wait_s": 0.5, "step_s": 2.0},
         r"rank 2 waits for its loader 25% of the time",
         ("autotune workers --profile P", "train.data.loader_workers", "train.data.stage_to")),
        (ROWS, 3.0, [0.0] * 6, [1.0, 1.0, 1.0, 1.0, 2.0, 3.0], Kind.STRAGGLER,
         {"rank": 5.0, "ratio": 3.0, "compute_s": 3.0, "median_s": 1.0},
         r"rank 5 computes 3\.00 times as long.*slow as well: 4", ("nvidia-smi -q -d PERFORMANCE",)),
    ],
    ids=["starved", "slow"],
)  # fmt: skip
def test_a_rank_is_named_with_its_figures_and_what_to_do(
    rows, step_s, waits, compute, kind, values, message, next_steps
):
    pace = PaceMonitor()
    for _ in range(rows):
        found = pace.look(step_s=step_s, data_wait_s=waits, compute_s=compute)
    (one,) = found
    assert (one.kind, one.action, one.values) == (kind, Action.WARN, values)
    assert re.search(message, one.message)
    assert all(step in one.next_step for step in next_steps)
    assert kind is Kind.STARVED or any("hot" in cause for cause in one.causes)


@pytest.mark.parametrize(("bad", "first"), [(waiting(0.5, 1), 2 * ROWS), (slow(2.0, 1), ROWS)])
def test_single_bad_rows_are_no_matter_and_it_is_said_again_only_after_a_time_of_calm(bad, first):
    calm = waiting(0.0, 1)
    assert told((bad * (ROWS - 1) + calm) * 20) == []
    begin = bad * first
    assert len(told(begin + (calm * (ROWS - 1) + bad * ROWS) * 5)) == 1
    again = told(begin + calm * ROWS + bad * ROWS)
    assert [number for number, _ in again] == [first, first + 2 * ROWS]


@pytest.mark.parametrize(
    "rows",
    [
        [([0.0] * 4, [2.0 if rank == row % 4 else 1.0 for rank in range(4)]) for row in range(100)],
        [([0.0] * 4, [1.0, None, 5.0, 1.0])] * 50,
        [([], [])] * 50,
        [([0.0], [9.0])] * 50,
    ],
    ids=["ranks in turn", "unknown times", "no ranks", "a rank alone"],
)
def test_nothing_is_said_of_stragglers_where_none_can_be_told(rows):
    assert told(rows) == []


@given(
    share=st.floats(0, STARVED_SHARE),
    ratios=st.lists(st.floats(1, STRAGGLER_RATIO - 1e-6), min_size=1, max_size=9),
)
def test_what_stays_within_the_bounds_is_never_said(share, ratios):
    assert told([([share] * len(ratios), list(ratios))] * (3 * ROWS)) == []


def test_both_can_be_said_of_one_row_and_ranks_are_named_with_their_host_where_it_is_known():
    pace = PaceMonitor(hosts=("n1", "n1", "n2"))
    found = []
    for _ in range(2 * ROWS):
        found += pace.look(step_s=1.0, data_wait_s=[0.0, 0.0, 0.5], compute_s=[1.0, 2.0, 1.0])
    assert {one.kind for one in found} == {Kind.STARVED, Kind.STRAGGLER}
    assert {"rank 2 (n2) waits", "rank 1 (n1) computes"} == {" ".join(one.message.split()[:4]) for one in found}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_middle_is_the_median(values):
    assert middle(sorted(values)) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("seed", range(5))
def test_scatter_is_the_standard_deviation_of_normal_values_whatever_a_third_of_them_is(seed):
    rng = random.Random(seed)
    values = [rng.gauss(5, 2) for _ in range(2000)]
    centre, sigma = centre_and_scatter(sorted(values))
    assert centre == pytest.approx(5, abs=0.2)
    assert sigma == pytest.approx(2, rel=0.1)
    centre, sigma = centre_and_scatter(sorted(values + [1e9] * 600))
    assert centre < 7
    assert sigma < 4


@pytest.mark.parametrize("seed", range(5))
def test_what_falls_is_where_it_is_now_and_scatters_around_its_way_and_what_rises_is_held_against_all_of_it(seed):
    rng = random.Random(seed)
    falling = [10 - 0.05 * step + rng.gauss(0, 0.1) for step in range(128)]
    level, sigma = level_and_scatter(falling)
    assert level == pytest.approx(10 - 0.05 * 96, abs=0.2)
    assert sigma == pytest.approx(0.1, rel=0.4)
    assert centre_and_scatter(sorted(falling))[1] > 1
    assert level_and_scatter(falling[::-1]) == centre_and_scatter(sorted(falling))


@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_a_median_is_that_of_repeated_draws_and_a_slope_adds_nothing(seed):
    rng = random.Random(seed)
    blocks = [rng.gauss(0, 1) for _ in range(400)]
    _, error = median_and_error(blocks)
    assert error == pytest.approx(1.2533 / math.sqrt(400), rel=0.2)
    _, sloped = median_and_error([value + 0.05 * place for place, value in enumerate(blocks)])
    assert sloped == pytest.approx(error, rel=0.1)
    assert median_and_error([2.5]) == (2.5, 0.0)  # of one block none can be told
