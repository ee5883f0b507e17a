"""Replay of a sequence of allocations through torch's caching allocator on a GPU.

The allocator follows ``c10/cuda/CUDACachingAllocator.cpp`` under
``expandable_segments:True``. Sizes are rounded to 512 bytes. Requests of up to 1 MiB on
a stream share one segment, larger ones another. The smallest free block that is large
enough is taken; the last block of a segment counts with the size to which it could
grow. If none is large enough, the segment grows by pages of 2 or 20 MiB. Adjacent free
blocks are merged. Having to give pages back counts as not fitting.
"""

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from autotune.base.units import MIB
from autotune.memory.decide.rounding import round_up

ROUND_BYTES = 512
"""Sizes of blocks are multiples of this."""
SMALL_BYTES = MIB
"""Largest request that is served from the segment for small ones."""
SMALL_PAGE_BYTES = 2 * MIB
"""Page of the segment for small requests."""
LARGE_PAGE_BYTES = 20 * MIB
"""Page of the segment for all other requests."""
ADDRESS_SHARE = 9 / 8
"""Addresses that a segment reserves, as a share of the device's memory."""


class Segment:
    """An expandable segment: blocks by address, from 0 to ``reserved_bytes``.

    It grows by whole pages, and never shrinks.

    Args:
        page_bytes: Size of a page.
        address_bytes: Size of the range of addresses that the segment may fill.
    """

    def __init__(self, page_bytes: int, address_bytes: float = math.inf) -> None:
        self.reserved_bytes = 0
        """Size of all pages so far."""
        self._page_bytes = page_bytes
        self._address_bytes = address_bytes
        self._free: list[tuple[int, int]] = []
        """Size and address of each free block, in ascending order of both."""
        self._size_at: dict[int, int] = {}
        """Sizes of the free blocks by address."""
        self._size_before: dict[int, int] = {}
        """Sizes of the free blocks by end address."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a new block."""
        index = self._smallest_that_fits(size_bytes)
        if index < len(self._free):
            block_bytes, address = self._free[index]
            self._remove(block_bytes, address)
        else:
            address = self._grow(size_bytes)
            block_bytes = self.reserved_bytes - address
        if block_bytes > size_bytes:
            self._add(block_bytes - size_bytes, address + size_bytes)
        return address

    def _smallest_that_fits(self, size_bytes: int) -> int:
        """Return the index of the free block to take; their number if none fits."""
        index = bisect.bisect_left(self._free, (size_bytes, 0))
        if index + 1 < len(self._free):
            block_bytes, address = self._free[index]
            next_bytes, _ = self._free[index + 1]
            # The last block counts with the size to which it could grow, so that the
            # next larger one may be the smaller of the two.
            is_last = address + block_bytes == self.reserved_bytes
            if is_last and next_bytes < self._address_bytes - address:
                return index + 1
        return index

    def _grow(self, size_bytes: int) -> int:
        """Grow by whole pages until a block fits at the end; return its address.

        A free block at the end becomes a part of it.
        """
        last_bytes = self._size_before.get(self.reserved_bytes, 0)
        address = self.reserved_bytes - last_bytes
        if last_bytes:
            self._remove(last_bytes, address)
        self.reserved_bytes = round_up(address + size_bytes, self._page_bytes)
        return address

    def release(self, address: int, size_bytes: int) -> None:
        """Free a block, and merge it with free neighbours."""
        before_bytes = self._size_before.get(address)
        if before_bytes:
            self._remove(before_bytes, address - before_bytes)
            address -= before_bytes
            size_bytes += before_bytes
        after_bytes = self._size_at.get(address + size_bytes)
        if after_bytes:
            self._remove(after_bytes, address + size_bytes)
            size_bytes += after_bytes
        self._add(size_bytes, address)

    def _add(self, size_bytes: int, address: int) -> None:
        """Add a free block."""
        bisect.insort(self._free, (size_bytes, address))
        self._size_at[address] = size_bytes
        self._size_before[address + size_bytes] = size_bytes

    def _remove(self, size_bytes: int, address: int) -> None:
        """Remove a free block."""
        del self._free[bisect.bisect_left(self._free, (size_bytes, address))]
        del self._size_at[address]
        del self._size_before[address + size_bytes]


def rounded_bytes(requested_bytes: int) -> int:
    """Return the size of the block that serves a request; 0 for an empty request."""
    # ``round_up`` without its call, as a replay rounds every allocation.
    return -(-requested_bytes // ROUND_BYTES) * ROUND_BYTES


class _Block(NamedTuple):
    """An allocated block of a segment."""

    segment: Segment
    address: int
    size_bytes: int

    def release(self) -> None:
        self.segment.release(self.address, self.size_bytes)


def reserve(
    sizes_bytes: Sequence[int],
    events: Sequence[int],
    streams: Sequence[int] | None = None,
    *,
    device_bytes: float = math.inf,
) -> int:
    """Replay a sequence of allocations through the caching allocator.

    Args:
        sizes_bytes: Requested size of each allocation.
        events: ``i`` makes allocation i, and ``-1 - i`` releases it.
        streams: CUDA stream of each allocation; None if all are on one.
        device_bytes: Memory of the device.

    Returns:
        The bytes that are reserved at the end. Segments never shrink, so it is the
        peak.
    """
    # Small and large requests of each stream have a segment of their own: segments are
    # found by page size and stream.
    segments: dict[tuple[int, int], Segment] = {}
    block_of_allocation: dict[int, _Block] = {}
    for event in events:
        is_release = event < 0
        if is_release:
            # An empty request has no block.
            released = block_of_allocation.pop(-1 - event, None)
            if released is not None:
                released.release()
            continue
        size_bytes = rounded_bytes(sizes_bytes[event])
        if not size_bytes:
            continue
        page_bytes = SMALL_PAGE_BYTES if size_bytes <= SMALL_BYTES else LARGE_PAGE_BYTES
        stream = streams[event] if streams else 0
        segment = segments.get((page_bytes, stream))
        if segment is None:
            segment = Segment(page_bytes, device_bytes * ADDRESS_SHARE)
            segments[page_bytes, stream] = segment
        block_of_allocation[event] = _Block(
            segment=segment,
            address=segment.allocate(size_bytes),
            size_bytes=size_bytes,
        )
    return sum(segment.reserved_bytes for segment in segments.values())
