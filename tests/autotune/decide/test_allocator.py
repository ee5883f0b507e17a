import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.decide.memory import LARGE_PAGE_BYTES, MIB, SMALL_PAGE_BYTES, Segment, reserve, rounded_bytes

SIZES = st.one_of(st.integers(1, 64), st.integers(1, 4 * MIB), st.integers(1, 64 * MIB)).map(rounded_bytes)
SEQUENCES = st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 2**16)), min_size=1, max_size=60)
"""Sizes; whether a block is released before; which."""


@pytest.mark.parametrize(
    ("sizes", "events", "reserved"),
    [
        ([0], [0], 0),
        ([512], [0], SMALL_PAGE_BYTES),
        ([MIB], [0], SMALL_PAGE_BYTES),
        ([MIB + 1], [0], LARGE_PAGE_BYTES),
        ([20 * MIB], [0], LARGE_PAGE_BYTES),
        ([20 * MIB + 1], [0], 2 * LARGE_PAGE_BYTES),
        ([2 * MIB, 100], [0, 1], LARGE_PAGE_BYTES + SMALL_PAGE_BYTES),  # segments of their own
        ([MIB - 512, 1, 1], [0, 1, 2], SMALL_PAGE_BYTES),  # rounded up to 512 bytes
        ([2 * MIB - 512, 1], [0, 1], LARGE_PAGE_BYTES + SMALL_PAGE_BYTES),
        ([60 * MIB, 20 * MIB, 2 * MIB], [0, 1, -1, -2, 2], 80 * MIB),  # its largest moment, and keeps it
        ([20 * MIB, 60 * MIB], [0, -1, 1], 60 * MIB),
        ([60 * MIB, 20 * MIB], [0, -1, 1], 60 * MIB),
        ([0, 20 * MIB], [0, 1, -1, -2], 20 * MIB),
        ([6 * MIB, 16 * MIB], [0, 1], 40 * MIB),  # it grows by what its last free block lacks
    ],
)
def test_a_sequence_reserves_pages_of_2_mib_for_small_requests_and_of_20_for_others(sizes, events, reserved):
    assert reserve(sizes, events) == reserved


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    segment = Segment(MIB)
    blocks = [segment.allocate(size * MIB) for size in (4, 1, 3, 1)]
    segment.release(blocks[0], 4 * MIB)
    segment.release(blocks[2], 3 * MIB)
    assert segment.allocate(3 * MIB) == blocks[2]
    assert segment.allocate(3 * MIB) == blocks[0]


def test_the_last_block_is_taken_only_if_no_other_one_will_do():
    segment = Segment(8 * MIB)
    large, _ = segment.allocate(5 * MIB), segment.allocate(MIB)  # 2 MiB are left at the end
    segment.release(large, 5 * MIB)
    assert segment.allocate(2 * MIB) == large
    assert segment.allocate(2 * MIB) == large + 2 * MIB
    assert segment.allocate(2 * MIB) == large + 6 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_neighbours_that_are_free_become_one(order):
    segment = Segment(18 * MIB)
    blocks = [segment.allocate(6 * MIB) for _ in range(3)]
    for number in order:
        segment.release(blocks[number], 6 * MIB)
    assert segment.allocate(18 * MIB) == 0
    assert segment.reserved_bytes == 18 * MIB


def test_free_blocks_between_blocks_in_use_cannot_be_joined():
    segment = Segment(20 * MIB)
    blocks = [segment.allocate(5 * MIB) for _ in range(4)]
    segment.release(blocks[0], 5 * MIB)
    segment.release(blocks[2], 5 * MIB)
    segment.allocate(9 * MIB)
    assert segment.reserved_bytes == 40 * MIB


@settings(deadline=None)
@given(sequence=SEQUENCES, page=st.sampled_from([2 * MIB, 20 * MIB]))
def test_blocks_never_overlap_and_lie_within_what_is_reserved(sequence, page):
    segment = Segment(page)
    live: list[tuple[int, int]] = []
    reserved = 0
    for size, releases, which in sequence:
        if releases and live:
            segment.release(*live.pop(which % len(live)))
        live.append((segment.allocate(size), size))
        assert all(before[0] + before[1] <= after[0] for before, after in pairwise(sorted(live)))
        assert max(address + held for address, held in live) <= segment.reserved_bytes
        assert segment.reserved_bytes >= reserved
        assert segment.reserved_bytes % page == 0
        reserved = segment.reserved_bytes


@settings(deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=30), seed=st.integers(0, 2**16))
def test_the_order_of_releases_does_not_matter_once_everything_is_released(sizes, seed):
    segment = Segment(2 * MIB)
    blocks = [(segment.allocate(size), size) for size in sizes]
    random.Random(seed).shuffle(blocks)
    for block in blocks:
        segment.release(*block)
    reserved = segment.reserved_bytes
    assert segment.allocate(reserved) == 0
    assert segment.reserved_bytes == reserved


@pytest.mark.parametrize(("address_bytes", "taken"), [(100 * MIB, 0), (60 * MIB, 45 * MIB)])
def test_the_last_block_counts_as_what_it_could_grow_to(address_bytes, taken):
    segment = Segment(10 * MIB, address_bytes)
    large, _ = segment.allocate(40 * MIB), segment.allocate(5 * MIB)  # 5 MiB are left at the end
    segment.release(large, 40 * MIB)
    assert segment.allocate(MIB) == taken
