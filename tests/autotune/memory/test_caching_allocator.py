"""Replay of allocations through torch's caching allocator on a GPU."""

import math
import random
from itertools import pairwise

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
        pytest.param(20 * MIB, LARGE_PAGE_BYTES, id="a whole large page"),
        pytest.param(20 * MIB + 1, 2 * LARGE_PAGE_BYTES, id="more than a large page"),
    ],
)
def test_request_reserves_whole_pages(size_bytes, reserved_bytes):
    assert reserve([size_bytes], events=[0]) == reserved_bytes


@pytest.mark.parametrize(
    ("sizes_bytes", "reserved_bytes"),
    [
        pytest.param(
            [2 * MIB, 100],
            LARGE_PAGE_BYTES + SMALL_PAGE_BYTES,
            id="a large and a small one have a segment each",
        ),
        pytest.param(
            [2 * MIB - 512, 1],
            LARGE_PAGE_BYTES + SMALL_PAGE_BYTES,
            id="a small one does not fill up a large page",
        ),
        pytest.param(
            # Unrounded, all four would fit in one page.
            [MIB, MIB - 512, 1, 1],
            2 * SMALL_PAGE_BYTES,
            id="each is rounded up to 512 bytes",
        ),
        pytest.param(
            # Without the free 14 MiB of the first page, these would be three pages.
            [6 * MIB, 34 * MIB],
            2 * LARGE_PAGE_BYTES,
            id="a segment grows by what its last free block lacks",
        ),
    ],
)
def test_requests_share_pages(sizes_bytes, reserved_bytes):
    assert reserve(sizes_bytes, events=range(len(sizes_bytes))) == reserved_bytes


RELEASE_0 = -1
RELEASE_1 = -2


@pytest.mark.parametrize(
    ("sizes_mib", "events", "reserved_mib"),
    [
        pytest.param(
            [60, 20, 2], [0, 1, RELEASE_0, RELEASE_1, 2], 80, id="both at once"
        ),
        pytest.param([20, 60], [0, RELEASE_0, 1], 60, id="the larger one later"),
        pytest.param([60, 20], [0, RELEASE_0, 1], 60, id="the larger one first"),
        pytest.param([0, 20], [0, 1, RELEASE_0, RELEASE_1], 20, id="an empty one"),
    ],
)
def test_largest_moment_stays_reserved(sizes_mib, events, reserved_mib):
    sizes_bytes = [size * MIB for size in sizes_mib]
    assert reserve(sizes_bytes, events) == reserved_mib * MIB


def segment_with(
    *,
    page_mib: int,
    sizes_mib: list[int],
    released: list[int],
    address_bytes: float = math.inf,
) -> Segment:
    """Return a segment of blocks with these sizes, some of which are released.

    Args:
        page_mib: Size by which the segment grows.
        sizes_mib: Size of each block, by ascending address.
        released: Indices of the released blocks.
        address_bytes: Addresses to which the segment can grow.
    """
    segment = Segment(page_mib * MIB, address_bytes)
    blocks = [(segment.allocate(size * MIB), size * MIB) for size in sizes_mib]
    for index in released:
        address, size_bytes = blocks[index]
        segment.release(address, size_bytes)
    return segment


def test_smallest_sufficient_block_is_taken():
    segment = segment_with(page_mib=1, sizes_mib=[4, 1, 3, 1], released=[0, 2])
    # Of the free blocks, of 4 MiB at 0 and of 3 MiB at 5 MiB, the latter is smaller.
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
def test_last_block_counts_with_its_addresses(address_mib, taken_mib):
    segment = segment_with(
        page_mib=10,
        sizes_mib=[40, 5],
        released=[0],
        address_bytes=address_mib * MIB,
    )
    # Free are 40 MiB at 0, and the last 5 MiB, at 45 MiB.
    assert segment.allocate(MIB) == taken_mib * MIB


SIZES = st.one_of(
    st.integers(1, 64), st.integers(1, 4 * MIB), st.integers(1, 64 * MIB)
).map(rounded_bytes)
STEPS = st.tuples(SIZES, st.booleans(), st.integers(0, 2**16))
"""Size of a new block; whether an older one is released before; number of the latter.
"""
PAGES = st.sampled_from([SMALL_PAGE_BYTES, LARGE_PAGE_BYTES])


def replayed(steps, page_bytes):
    """Yield the segment and the address and size of each live block after each step."""
    segment = Segment(page_bytes)
    live_blocks: list[tuple[int, int]] = []
    for size_bytes, releases_block, number in steps:
        if releases_block and live_blocks:
            address, released_bytes = live_blocks.pop(number % len(live_blocks))
            segment.release(address, released_bytes)
        live_blocks.append((segment.allocate(size_bytes), size_bytes))
        yield segment, live_blocks


@settings(deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=60),
    page_bytes=PAGES,
)
def test_blocks_never_overlap(steps, page_bytes):
    for segment, live_blocks in replayed(steps, page_bytes):
        for (address, size_bytes), (next_address, _) in pairwise(sorted(live_blocks)):
            assert address + size_bytes <= next_address
        last_address, last_bytes = max(live_blocks)
        assert last_address + last_bytes <= segment.reserved_bytes


@settings(deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=60),
    page_bytes=PAGES,
)
def test_segment_grows_by_whole_pages_only(steps, page_bytes):
    reserved_bytes = 0
    for segment, _ in replayed(steps, page_bytes):
        assert segment.reserved_bytes >= reserved_bytes
        assert segment.reserved_bytes % page_bytes == 0
        reserved_bytes = segment.reserved_bytes


@settings(deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=60),
    page_bytes=PAGES,
    seed=st.integers(0, 2**16),
)
def test_free_blocks_are_merged(steps, page_bytes, seed):
    *_, (segment, live_blocks) = replayed(steps, page_bytes)
    random.Random(seed).shuffle(live_blocks)
    for address, size_bytes in live_blocks:
        segment.release(address, size_bytes)
    reserved_bytes = segment.reserved_bytes
    # One free block is the whole segment.
    assert segment.allocate(reserved_bytes) == 0
    assert segment.reserved_bytes == reserved_bytes
