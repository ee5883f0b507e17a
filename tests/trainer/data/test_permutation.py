import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.permutation import hash_words, permute


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_permutation_hits_every_index_once(size, seed, epoch):
    images = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(images.tolist()) == list(range(size))


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_permutation_maps_single_indices_of_millions(seed, epoch):
    size = 202_000_000
    images = permute(np.array([0, 1, size - 1], dtype=np.uint64), size, seed, epoch)
    assert len(set(images.tolist())) == 3
    assert images.max() < size


def test_permutations_differ_between_epochs_and_seeds():
    indices = np.arange(10_000, dtype=np.uint64)
    orders = [
        permute(indices, 10_000, seed, epoch)
        for seed, epoch in itertools.product(range(3), repeat=2)
    ]
    assert len({order.tobytes() for order in orders}) == 9


def test_permutation_leaves_no_neighbours_together():
    indices = np.arange(10_000, dtype=np.uint64)
    order = permute(indices, 10_000, 0, 0).astype(np.int64)
    mean_distance = np.abs(np.diff(order)).mean()
    # In a random permutation, the mean distance of neighbours is a third of the size,
    # here with a standard deviation of about 24.
    assert abs(mean_distance - 10_000 / 3) < 200


def test_image_of_an_index_is_uniform():
    # Image of index 0 of 16 over 3,200 seeds, of which 200 are expected for each. The
    # sum is chi-square with 15 degrees of freedom: above 60 once in a million.
    zero = np.zeros(1, dtype=np.uint64)
    images = [int(permute(zero, 16, seed, 0)[0]) for seed in range(3200)]
    counts = np.bincount(images, minlength=16)
    assert ((counts - 200) ** 2 / 200).sum() < 60


@given(first=st.integers(0, 2**64 - 1), second=st.integers(0, 2**64 - 1))
def test_hash_depends_on_the_order_of_words(first, second):
    hashes_match = hash_words(first, second)[0] == hash_words(second, first)[0]
    assert hashes_match == (first == second)
