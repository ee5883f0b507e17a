"""Estimates of the tokens that are lost if samples are cut to a limit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.formats.manifest import LengthHistogram, Shard, Split

BIN_TOKENS = 8
"""Width of the bins of short samples."""
SHORT_TOKENS = 1024
"""Length from which bins are wider."""
EDGES = [*range(0, SHORT_TOKENS, BIN_TOKENS), SHORT_TOKENS, 2048, 4096]
"""Lower edges of bins; the last one, from 4,096 on, is open-ended."""
WIDEST_BIN_TOKENS = 2048
"""Width of the widest bin that is not open-ended."""
MAX_TOKENS = 5000
"""Longest sample of these tests, which lies in the open-ended bin."""
MIN_LIMIT_TOKENS = 6
MAX_LIMIT_TOKENS = 3000
"""Limits of these tests: below, within and above most lengths."""


def lengths_between(shortest, longest):
    """Draw the lengths of a split's samples."""
    return st.lists(st.integers(shortest, longest), min_size=1, max_size=40)


def split_of(lengths):
    """Return a split whose samples have these lengths."""
    bins = np.searchsorted(EDGES, lengths, side="right") - 1
    counts = np.bincount(bins, minlength=len(EDGES))
    shard = Shard(
        tokens_file="t",
        offsets_file="o",
        samples=len(lengths),
        tokens=sum(lengths),
        tokens_sha256="0" * 64,
        offsets_sha256="0" * 64,
    )
    return Split(
        shards=[shard],
        length_histogram=LengthHistogram(edges=EDGES, counts=counts.tolist()),
    )


def true_share(lengths, limit):
    """Return the share that is lost, from the lengths themselves."""
    return sum(max(0, length - limit) for length in lengths) / sum(lengths)


@given(
    lengths=lengths_between(1, MAX_TOKENS),
    limit=st.integers(MIN_LIMIT_TOKENS, MAX_LIMIT_TOKENS),
)
def test_lost_share_is_a_share(lengths, limit):
    assert 0 <= split_of(lengths).cut_tokens_share(limit) <= 1


@given(lengths=lengths_between(1, SHORT_TOKENS - 1), excess=st.integers(0, 2000))
def test_nothing_is_lost_above_all_lengths(lengths, excess):
    # At least a bin above, as exact lengths are unknown.
    limit = max(lengths) + BIN_TOKENS + excess
    assert split_of(lengths).cut_tokens_share(limit) == 0


@given(
    lengths=lengths_between(MIN_LIMIT_TOKENS + WIDEST_BIN_TOKENS + 1, MAX_TOKENS),
    data=st.data(),
)
def test_share_is_exact_far_below_all_lengths(lengths, data):
    # Every sample is cut, whatever its length within its bin.
    max_limit = min(lengths) - WIDEST_BIN_TOKENS - 1
    limit = data.draw(st.integers(MIN_LIMIT_TOKENS, max_limit))
    share = split_of(lengths).cut_tokens_share(limit)
    assert share == pytest.approx(true_share(lengths, limit))


@given(
    lengths=lengths_between(1, SHORT_TOKENS - 1),
    limit_bins=st.integers(1, MAX_LIMIT_TOKENS // BIN_TOKENS),
)
def test_share_is_exact_to_half_a_bin(lengths, limit_bins):
    # At an edge, as a bin that contains the limit would add to the error.
    limit = limit_bins * BIN_TOKENS
    share = split_of(lengths).cut_tokens_share(limit)
    # Each sample counts as the middle of its bin.
    tolerance = BIN_TOKENS / 2 * len(lengths) / sum(lengths)
    assert abs(share - true_share(lengths, limit)) <= tolerance


def test_share_is_unknown_without_lengths():
    split = split_of([3, 5, 8])
    histogram = LengthHistogram(edges=[0], counts=[3])
    without_lengths = split.model_copy(update={"length_histogram": histogram})
    assert without_lengths.cut_tokens_share(8) is None


def test_share_is_unknown_without_tokens():
    histogram = LengthHistogram(edges=EDGES, counts=[0] * len(EDGES))
    split = Split(shards=[], length_histogram=histogram)
    assert split.cut_tokens_share(8) is None
