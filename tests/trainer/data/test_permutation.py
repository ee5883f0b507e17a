"""Pseudo-random permutations of the samples of an epoch."""

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
    size = 10_000
    indices = np.arange(size, dtype=np.uint64)
    orders = [
        permute(indices, size, seed, epoch)
        for seed, epoch in itertools.product(range(3), repeat=2)
    ]
    assert len({order.tobytes() for order in orders}) == len(orders) == 9


def test_permutation_leaves_no_neighbours_together():
    size = 10_000
    indices = np.arange(size, dtype=np.uint64)
    order = permute(indices, size, seed=0, epoch=0).astype(np.int64)
    mean_distance = np.abs(np.diff(order)).mean()
    # In a random permutation, the mean distance of neighbours is a third of the size,
    # here with a standard deviation of about 24.
    assert abs(mean_distance - size / 3) < 200


def test_image_of_an_index_is_uniform():
    size = 16
    seeds = 3200
    index = np.zeros(1, dtype=np.uint64)
    images = [int(permute(index, size, seed, epoch=0)[0]) for seed in range(seeds)]
    counts = np.bincount(images, minlength=size)
    expected_count = seeds / size
    statistic = ((counts - expected_count) ** 2 / expected_count).sum()
    # It is chi-square with 15 degrees of freedom: above 60 once in a million.
    assert statistic < 60


@given(first=st.integers(0, 2**64 - 1), second=st.integers(0, 2**64 - 1))
def test_hash_depends_on_the_order_of_words(first, second):
    hashes_match = hash_words(first, second)[0] == hash_words(second, first)[0]
    assert hashes_match == (first == second)
