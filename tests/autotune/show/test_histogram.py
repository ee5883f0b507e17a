import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.dataset import HISTOGRAM_EDGES
from autotune.show.histogram import BAR_WIDTH, length_histogram


def test_bins_are_joined_into_doublings_and_bars_are_to_scale():
    assert length_histogram([0, 8, 16, 24, 32], [1, 0, 3, 1, 2]).splitlines() == [
        "    0 to 7  ##########                                        1   14.3 %",
        "   8 to 15                                                    0    0.0 %",
        "  16 to 31  ########################################          4   57.1 %",
        "32 or more  ####################                              2   28.6 %",
    ]


def test_no_samples_draw_nothing():
    assert length_histogram([0, 8], [0, 0]) == ""


def test_edges_and_counts_must_belong_together():
    with pytest.raises(ValueError):
        length_histogram([0, 8, 16], [1, 2])


@given(st.lists(st.integers(0, 10**9), min_size=len(HISTOGRAM_EDGES), max_size=len(HISTOGRAM_EDGES)))
def test_every_filled_row_shows_a_bar_and_none_is_too_long(counts):
    for line in length_histogram(HISTOGRAM_EDGES, counts).splitlines():
        assert line.isascii()
        assert line.count("#") <= BAR_WIDTH
        assert ("#" in line) == (line.split()[-3] != "0")
