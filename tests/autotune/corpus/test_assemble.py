import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.corpus import assemble
from autotune.corpus.assemble import shard_edges

SIZES = st.lists(st.integers(0, 50).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, 10 * n))), max_size=30)


@given(sizes=SIZES)
def test_shards_hold_every_piece_once_within_their_bounds(sizes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "SHARD_TOKENS", 600)
        patch.setattr(assemble, "SHARD_SAMPLES", 60)
        edges = shard_edges(sizes)
    covered = [number for first, end in edges for number in range(first, end)]
    assert covered == sorted(set(covered))
    assert {number for number, (samples, _) in enumerate(sizes) if samples} <= set(covered)
    for first, end in edges:
        assert sum(samples for samples, _ in sizes[first:end]) > 0
        if end - first > 1:
            assert sum(samples for samples, _ in sizes[first:end]) <= 60
            assert sum(tokens for _, tokens in sizes[first:end]) <= 600


def test_nothing_makes_no_shard():
    assert shard_edges([]) == []
    assert shard_edges([(0, 0), (0, 0)]) == []
