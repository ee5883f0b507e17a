"""How many bytes torch's CUDA caching allocator reserves for a sequence of allocations, with expandable segments.

The rules of ``c10/cuda/CUDACachingAllocator.cpp`` under ``expandable_segments:True``. Sizes are rounded to 512 bytes.
Requests of up to 1 MiB on a stream share one segment, larger ones another. The smallest free block that is large
enough is taken, where the last one of a segment counts as what it could grow to; if none is large enough, the segment
grows by pages of 2 or 20 MiB. Adjacent free blocks become one. Pages are only given back when memory runs out, and
running out counts as not fitting.
"""

import bisect
import math
from collections.abc import Sequence

MIB = 2**20
ROUND_BYTES = 512
SMALL_BYTES = MIB
"""Requests of up to this size share the segment for small ones."""
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 * MIB, 20 * MIB
ADDRESS_SHARE = 9 / 8


class Segment:
    """One expandable segment: blocks by address, from 0 to ``reserved_bytes``; it grows by whole pages."""

    def __init__(self, page_bytes: int, address_bytes: float = math.inf) -> None:
        self.reserved_bytes = 0
        self._page_bytes, self._address_bytes = page_bytes, address_bytes
        self._free: list[tuple[int, int]] = []
        """Size and address of each free block, ascending."""
        self._size_at: dict[int, int] = {}
        """The free blocks by their addresses, and by their ends."""
        self._size_before: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int:
        """Return the address of a new block."""
        index = bisect.bisect_left(self._free, (size_bytes, 0))
        if index < len(self._free) - 1:
            (size, address), (other, _) = self._free[index : index + 2]
            is_last = address + size == self.reserved_bytes
            index += is_last and other < self._address_bytes - address
        if index < len(self._free):
            found, address = self._free[index]
        else:
            found, address = self._grow(size_bytes)
        self._remove(found, address)
        if found > size_bytes:
            self._add(found - size_bytes, address + size_bytes)
        return address

    def release(self, address: int, size_bytes: int) -> None:
        """Free a block, and merge it with free neighbours."""
        if before := self._size_before.get(address):
            self._remove(before, address - before)
            address, size_bytes = address - before, size_bytes + before
        if after := self._size_at.get(address + size_bytes):
            self._remove(after, address + size_bytes)
            size_bytes += after
        self._add(size_bytes, address)

    def _grow(self, size_bytes: int) -> tuple[int, int]:
        """Make the last free block large enough; return its size and address."""
        last = self._size_before.get(self.reserved_bytes, 0)
        address = self.reserved_bytes - last
        if last:
            self._remove(last, address)
        self.reserved_bytes = -(-(address + size_bytes) // self._page_bytes) * self._page_bytes
        self._add(self.reserved_bytes - address, address)
        return self.reserved_bytes - address, address

    def _add(self, size_bytes: int, address: int) -> None:
        bisect.insort(self._free, (size_bytes, address))
        self._size_at[address] = self._size_before[address + size_bytes] = size_bytes

    def _remove(self, size_bytes: int, address: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size_bytes, address))]
        del self._size_at[address], self._size_before[address + size_bytes]


def rounded_bytes(requested_bytes: int) -> int:
    """Return the size of the block that a request gets; a request of nothing gets none."""
    return -(-requested_bytes // ROUND_BYTES) * ROUND_BYTES


def reserve(
    sizes_bytes: Sequence[int],
    events: Sequence[int],
    streams: Sequence[int] | None = None,
    *,
    device_bytes: float = math.inf,
) -> int:
    """Play a sequence of allocations; return the bytes reserved at its end, which is also its peak.

    Args:
        sizes_bytes: Requested by each allocation.
        events: ``i``: allocation i is made; ``-1 - i``: it is released.
        streams: Of each allocation; None if there is one.
        device_bytes: Of all memory that the device has; each segment may grow to 9/8 of it.
    """
    segments: dict[tuple[int, int], Segment] = {}
    blocks: dict[int, tuple[Segment, int, int]] = {}
    for event in events:
        if event >= 0:
            size = rounded_bytes(sizes_bytes[event])
            if size:
                page_bytes = SMALL_PAGE_BYTES if size <= SMALL_BYTES else LARGE_PAGE_BYTES
                key = page_bytes, streams[event] if streams else 0
                segment = segments.get(key)
                if segment is None:
                    segment = segments[key] = Segment(page_bytes, device_bytes * ADDRESS_SHARE)
                blocks[event] = segment, segment.allocate(size), size
        elif -1 - event in blocks:
            segment, address, size = blocks.pop(-1 - event)
            segment.release(address, size)
    return sum(segment.reserved_bytes for segment in segments.values())
