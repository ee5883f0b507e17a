import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.plan import hash_words, permute, to_unit


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_a_permutation_hits_every_index_once(size, seed, epoch):
    result = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(result.tolist()) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own():
    indices = np.arange(1000, dtype=np.uint64)
    orders = {tuple(permute(indices, 1000, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_permutation_of_202_million_is_answered_for_single_indices():
    result = permute(np.array([0, 1, 201_999_999], dtype=np.uint64), 202_000_000, 7, 0)
    assert len(set(result.tolist())) == 3
    assert result.max() < 202_000_000


def test_neighbours_end_up_far_apart():
    result = permute(np.arange(10_000, dtype=np.uint64), 10_000, 0, 0).astype(np.int64)
    # Of a random permutation the mean distance is a third of the size.
    assert abs(np.abs(np.diff(result)).mean() - 10_000 / 3) < 200


def test_where_each_index_lands_is_uniform():
    # Where index 0 of 16 lands over many seeds: chi-square with 15 degrees of freedom, wrong once in a million.
    landed = [int(permute(np.zeros(1, dtype=np.uint64), 16, seed, 0)[0]) for seed in range(3200)]
    counts = np.bincount(landed, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 60


@given(a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_a_hash_tells_the_order_of_its_words(a, b):
    assert (hash_words(a, b)[0] == hash_words(b, a)[0]) == (a == b)


def test_words_become_numbers_from_0_to_below_1():
    units = to_unit(np.array([0, 2**63, 2**64 - 1], dtype=np.uint64))
    assert units[:2].tolist() == [0.0, 0.5]
    assert 1 - 1e-15 < units[2] < 1
