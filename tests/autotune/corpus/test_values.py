import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.corpus.values import HISTOGRAM_EDGES, LengthDistribution

lengths_lists = st.lists(
    st.one_of(st.integers(0, 1500), st.integers(0, 2**20)), min_size=1, max_size=60
)
sequence_lengths = st.integers(3, 1024)


def distribution(lengths):
    counts = [0] * len(HISTOGRAM_EDGES)
    for length in lengths:
        counts[bisect.bisect_right(HISTOGRAM_EDGES, length) - 1] += 1
    return LengthDistribution(edges=HISTOGRAM_EDGES, counts=counts)


@given(lengths_lists, sequence_lengths, sequence_lengths)
def test_means_stay_within_the_stated_error(lengths, seq_length, other_seq_length):
    data = distribution(lengths)
    short, long = sorted((seq_length, other_seq_length))
    for seq_length_tokens in (short, long):
        truth = sum(min(length, seq_length_tokens) for length in lengths) / len(lengths)
        assert data.mean_tokens(seq_length_tokens) == pytest.approx(
            truth, abs=3.5 + 1e-9
        )
        real = sum(min(length, seq_length_tokens - 2) + 2 for length in lengths)
        waste = data.padding_waste(seq_length_tokens)
        assert 0 <= waste <= 1
        assert waste == pytest.approx(
            1 - real / (len(lengths) * seq_length_tokens),
            abs=3.5 / seq_length_tokens + 1e-9,
        )
    assert data.mean_tokens() == pytest.approx(
        sum(lengths) / len(lengths), abs=max(3.5, max(lengths) / 2) + 1e-6
    )
    assert data.mean_tokens(short) <= data.mean_tokens(long) + 1e-9
    assert data.truncated_share(short) >= data.truncated_share(long)
    assert data.mean_tokens(long) <= long


@given(lengths_lists, st.lists(st.floats(0, 1), min_size=2, max_size=6).map(sorted))
def test_percentiles_lie_in_the_right_bin(lengths, shares):
    values = [distribution(lengths).percentile_tokens(share) for share in shares]
    assert values == sorted(values)
    for share, value in zip(shares, values, strict=True):
        truth = sorted(lengths)[max(-int(-share * len(lengths) // 1), 1) - 1]
        index = bisect.bisect_right(HISTOGRAM_EDGES, truth) - 1
        end = (
            HISTOGRAM_EDGES[index + 1]
            if index + 1 < len(HISTOGRAM_EDGES)
            else truth + 1
        )
        assert HISTOGRAM_EDGES[index] <= value < end


def test_computes_figures_of_a_histogram():
    data = LengthDistribution(edges=[0, 8, 16], counts=[2, 1, 1])
    # Bins count as 3.5, 3.5, 11.5, and the open one as 16.
    assert (data.samples, data.mean_tokens()) == (4, pytest.approx(34.5 / 4))
    assert data.mean_tokens(8) == pytest.approx((3.5 + 3.5 + 8 + 8) / 4)
    assert data.mean_tokens(10) == pytest.approx(
        (3.5 + 3.5 + (8 + 9 + 6 * 10) / 8 + 10) / 4
    )
    assert data.truncated_share(11) == pytest.approx((0.5 + 1) / 4)
    assert data.padding_waste(10) == pytest.approx(1 - (23 / 4 + 2) / 10)
    assert data.percentile_tokens(0.5) == 7
    assert data.percentile_tokens(1) == 16


def test_no_samples_have_no_figures():
    for edges in ([0, 8], []):
        empty = LengthDistribution(edges=edges, counts=[0] * len(edges))
        figures = (
            empty.mean_tokens(),
            empty.percentile_tokens(0.5),
            empty.truncated_share(5),
            empty.padding_waste(5),
        )
        assert figures == (None,) * 4


def test_single_bin_tells_no_lengths():
    data = LengthDistribution(edges=[0], counts=[100])
    assert (data.samples, data.unknown) == (100, True)
    assert data.mean_tokens() is None
    assert data.percentile_tokens(0.5) is None
    assert data.truncated_share(5) is None
    assert data.padding_waste(5) is None


def test_length_must_exceed_special_tokens():
    data = LengthDistribution(edges=[0, 8], counts=[0, 0])
    with pytest.raises(ValueError, match="only room for special"):
        data.padding_waste(2)
