"""Replay of allocations through torch's caching allocator on a GPU."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.base.units import MIB
from autotune.memory.decide.caching_allocator import (
    LARGE_PAGE_BYTES,
    SMALL_PAGE_BYTES,
    Segment,
    reserve,
    rounded_bytes,
)


@pytest.mark.parametrize(
    ("size_bytes", "reserved_bytes"),
    [
        pytest.param(0, 0, id="empty request"),
        pytest.param(512, SMALL_PAGE_BYTES, id="smallest block"),
        pytest.param(MIB, SMALL_PAGE_BYTES, id="largest small request"),
        pytest.param(MIB + 1, LARGE_PAGE_BYTES, id="smallest large request"),
        pytest.param(20 * MIB, LARGE_PAGE_BYTES, id="exactly a large page"),
        pytest.param(20 * MIB + 1, 2 * LARGE_PAGE_BYTES, id="more than a large page"),
    ],
)
def test_request_reserves_whole_pages(size_bytes, reserved_bytes):
    assert reserve([size_bytes], events=[0]) == reserved_bytes


@pytest.mark.parametrize(
    "sizes_bytes",
    [
        pytest.param([2 * MIB, 100], id="large page has room for the small request"),
        pytest.param([2 * MIB - 512, 1], id="small request would fill 2 MiB exactly"),
    ],
)
def test_small_and_large_requests_never_share_pages(sizes_bytes):
    reserved_bytes = reserve(sizes_bytes, events=[0, 1])
    assert reserved_bytes == LARGE_PAGE_BYTES + SMALL_PAGE_BYTES


def test_requests_are_rounded_up_to_512_bytes():
    # Unrounded, all four would fit into one page of 2 MiB.
    sizes_bytes = [MIB, MIB - 512, 1, 1]
    assert reserve(sizes_bytes, events=[0, 1, 2, 3]) == 2 * SMALL_PAGE_BYTES


def test_segment_grows_only_by_missing_bytes():
    # 34 MiB alone take two pages. Here 14 MiB of the first page are free, and the
    # missing 20 MiB are one page more.
    assert reserve([6 * MIB, 34 * MIB], events=[0, 1]) == 2 * LARGE_PAGE_BYTES


# Events of the first three allocations.
MAKE_0 = 0
MAKE_1 = 1
MAKE_2 = 2
RELEASE_0 = -1
RELEASE_1 = -2


@pytest.mark.parametrize(
    ("sizes_mib", "events", "reserved_mib"),
    [
        pytest.param(
            [60, 20, 2],
            [MAKE_0, MAKE_1, RELEASE_0, RELEASE_1, MAKE_2],
            80,
            id="two at once, then a small one",
        ),
        pytest.param(
            [20, 60], [MAKE_0, RELEASE_0, MAKE_1], 60, id="the larger one later"
        ),
        pytest.param(
            [60, 20], [MAKE_0, RELEASE_0, MAKE_1], 60, id="the larger one first"
        ),
        pytest.param(
            [0, 20], [MAKE_0, MAKE_1, RELEASE_0, RELEASE_1], 20, id="an empty one"
        ),
    ],
)
def test_pages_of_the_fullest_moment_stay_reserved(sizes_mib, events, reserved_mib):
    sizes_bytes = [size_mib * MIB for size_mib in sizes_mib]
    assert reserve(sizes_bytes, events) == reserved_mib * MIB


def segment_with(
    *,
    page_mib: int,
    sizes_mib: list[int],
    released: list[int],
    address_bytes: float = math.inf,
) -> Segment:
    """Return a segment of adjacent blocks, some of which are released.

    Args:
        page_mib: Size of the pages by which the segment grows.
        sizes_mib: Size of each block, by ascending address.
        released: Indices of the released blocks.
        address_bytes: Size to which the segment can grow.
    """
    segment = Segment(page_mib * MIB, address_bytes)
    addresses = [segment.allocate(size_mib * MIB) for size_mib in sizes_mib]
    for index in released:
        segment.release(addresses[index], sizes_mib[index] * MIB)
    return segment


def test_smallest_sufficient_block_is_taken():
    segment = segment_with(page_mib=1, sizes_mib=[4, 1, 3, 1], released=[0, 2])
    # Free are 4 MiB at 0, and 3 MiB at 5 MiB.
    assert segment.allocate(3 * MIB) == 5 * MIB
    assert segment.allocate(3 * MIB) == 0


def test_last_block_is_taken_if_no_other_fits():
    segment = segment_with(page_mib=8, sizes_mib=[5, 1], released=[0])
    # Free are 5 MiB at 0, and 2 MiB at the end of the page, at 6 MiB.
    addresses = [segment.allocate(2 * MIB) for _ in range(3)]
    assert addresses == [0, 2 * MIB, 6 * MIB]


@pytest.mark.parametrize(
    ("address_mib", "taken_mib"),
    [
        pytest.param(100, 0, id="last block could grow to 55 MiB"),
        pytest.param(60, 45, id="last block could grow to 15 MiB"),
    ],
)
def test_last_block_counts_with_its_possible_size(address_mib, taken_mib):
    segment = segment_with(
        page_mib=10,
        sizes_mib=[40, 5],
        released=[0],
        address_bytes=address_mib * MIB,
    )
    # Free are 40 MiB at 0, and at 45 MiB the last 5 MiB, which can grow up to the end
    # of the addresses.
    assert segment.allocate(MIB) == taken_mib * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a replay, which makes a block and may release an older one before."""

    size_bytes: int
    """Size of the new block."""
    releases_block: bool
    released_number: int
    """Number that selects the released block among the live ones."""


class Block(NamedTuple):
    """A live block of a segment."""

    address: int
    size_bytes: int


BLOCK_SIZES_BYTES = st.one_of(
    st.integers(1, 64), st.integers(1, 4 * MIB), st.integers(1, 64 * MIB)
).map(rounded_bytes)
REPLAYS = st.lists(
    st.builds(
        Step,
        size_bytes=BLOCK_SIZES_BYTES,
        releases_block=st.booleans(),
        released_number=st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=60,
)
PAGE_SIZES_BYTES = st.sampled_from([SMALL_PAGE_BYTES, LARGE_PAGE_BYTES])


def replay(steps: list[Step], page_bytes: int) -> Iterator[tuple[Segment, list[Block]]]:
    """Yield the segment and its live blocks after each step."""
    segment = Segment(page_bytes)
    live_blocks: list[Block] = []
    for step in steps:
        if step.releases_block and live_blocks:
            released = live_blocks.pop(step.released_number % len(live_blocks))
            segment.release(released.address, released.size_bytes)
        address = segment.allocate(step.size_bytes)
        live_blocks.append(Block(address=address, size_bytes=step.size_bytes))
        yield segment, live_blocks


@settings(deadline=None)
@given(steps=REPLAYS, page_bytes=PAGE_SIZES_BYTES)
def test_blocks_never_overlap(steps, page_bytes):
    for segment, live_blocks in replay(steps, page_bytes):
        for block, next_block in pairwise(sorted(live_blocks)):
            assert block.address + block.size_bytes <= next_block.address
        last_block = max(live_blocks)
        assert last_block.address + last_block.size_bytes <= segment.reserved_bytes


@settings(deadline=None)
@given(steps=REPLAYS, page_bytes=PAGE_SIZES_BYTES)
def test_segment_grows_by_whole_pages_only(steps, page_bytes):
    reserved_bytes = 0
    for segment, _ in replay(steps, page_bytes):
        assert segment.reserved_bytes >= reserved_bytes
        assert segment.reserved_bytes % page_bytes == 0
        reserved_bytes = segment.reserved_bytes


@settings(deadline=None)
@given(steps=REPLAYS, page_bytes=PAGE_SIZES_BYTES, seed=st.integers(0, 2**16))
def test_free_neighbours_become_one_block(steps, page_bytes, seed):
    *_, (segment, live_blocks) = replay(steps, page_bytes)
    random.Random(seed).shuffle(live_blocks)
    for block in live_blocks:
        segment.release(block.address, block.size_bytes)
    reserved_bytes = segment.reserved_bytes
    # One free block is the whole segment.
    assert segment.allocate(reserved_bytes) == 0
    assert segment.reserved_bytes == reserved_bytes
