import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.decide.batch_search import MIB
from autotune.memory.decide.caching_allocator import (
    LARGE_PAGE_BYTES,
    SMALL_PAGE_BYTES,
    Segment,
    reserve,
    rounded_bytes,
)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (0, 0),
        (512, SMALL_PAGE_BYTES),
        (MIB, SMALL_PAGE_BYTES),
        (MIB + 1, LARGE_PAGE_BYTES),
        (20 * MIB, LARGE_PAGE_BYTES),
        (20 * MIB + 1, 2 * LARGE_PAGE_BYTES),
    ],
)
def test_request_reserves_whole_pages(size, reserved):
    assert reserve([size], [0]) == reserved


@pytest.mark.parametrize(
    ("sizes", "reserved"),
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
            [MIB - 512, 1, 1], SMALL_PAGE_BYTES, id="each is rounded up to 512 bytes"
        ),
        pytest.param(
            [6 * MIB, 16 * MIB],
            2 * LARGE_PAGE_BYTES,
            id="a segment grows by what its last free block lacks",
        ),
    ],
)
def test_requests_share_pages(sizes, reserved):
    assert reserve(sizes, range(len(sizes))) == reserved


@pytest.mark.parametrize(
    ("sizes_mib", "events", "reserved_mib"),
    [
        ([60, 20, 2], [0, 1, -1, -2, 2], 80),
        ([20, 60], [0, -1, 1], 60),
        ([60, 20], [0, -1, 1], 60),
        ([0, 20], [0, 1, -1, -2], 20),
    ],
)
def test_largest_moment_stays_reserved(sizes_mib, events, reserved_mib):
    assert reserve([size * MIB for size in sizes_mib], events) == reserved_mib * MIB


def with_released(
    page_mib: int,
    sizes_mib: list[int],
    released: list[int],
    *,
    address_bytes: float = math.inf,
) -> Segment:
    """Return a segment of blocks, of which those with these numbers are released."""
    segment = Segment(page_mib * MIB, address_bytes)
    blocks = [(segment.allocate(size * MIB), size * MIB) for size in sizes_mib]
    for number in released:
        segment.release(*blocks[number])
    return segment


def test_smallest_sufficient_block_is_taken():
    segment = with_released(1, [4, 1, 3, 1], released=[0, 2])
    # Of the free blocks, of 4 MiB at 0 and of 3 MiB at 5 MiB, the latter is smaller.
    assert segment.allocate(3 * MIB) == 5 * MIB
    assert segment.allocate(3 * MIB) == 0


def test_last_block_is_taken_if_no_other_fits():
    segment = with_released(8, [5, 1], released=[0])
    # Free are 5 MiB at 0, and 2 MiB at the end of the page, at 6 MiB.
    addresses = [segment.allocate(2 * MIB) for _ in range(3)]
    assert addresses == [0, 2 * MIB, 6 * MIB]


@pytest.mark.parametrize(("address_mib", "taken_mib"), [(100, 0), (60, 45)])
def test_last_block_counts_with_its_addresses(address_mib, taken_mib):
    # Free are 40 MiB at 0, and the last 5 MiB, at 45 MiB. With 100 MiB of addresses,
    # the last block could grow to 55 MiB; with 60 MiB of them, to 15.
    segment = with_released(10, [40, 5], [0], address_bytes=address_mib * MIB)
    assert segment.allocate(MIB) == taken_mib * MIB


SIZES = st.one_of(
    st.integers(1, 64), st.integers(1, 4 * MIB), st.integers(1, 64 * MIB)
).map(rounded_bytes)
STEPS = st.tuples(SIZES, st.booleans(), st.integers(0, 2**16))
"""Size of a new block; whether a block is released before; number of that block."""


@settings(deadline=None)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=60),
    page=st.sampled_from([SMALL_PAGE_BYTES, LARGE_PAGE_BYTES]),
    seed=st.integers(0, 2**16),
)
def test_blocks_never_overlap(steps, page, seed):
    segment = Segment(page)
    live: list[tuple[int, int]] = []
    reserved = 0
    for size, releases, number in steps:
        if releases and live:
            segment.release(*live.pop(number % len(live)))
        live.append((segment.allocate(size), size))
        for (address, held), (next_address, _) in pairwise(sorted(live)):
            assert address + held <= next_address
        assert max(address + held for address, held in live) <= segment.reserved_bytes
        assert segment.reserved_bytes >= reserved
        assert segment.reserved_bytes % page == 0
        reserved = segment.reserved_bytes
    random.Random(seed).shuffle(live)
    for address, held in live:
        segment.release(address, held)
    # All free blocks are merged into one.
    assert segment.allocate(reserved) == 0
    assert segment.reserved_bytes == reserved
