"""How many bytes torch's CUDA caching allocator reserves for a sequence of allocations, by its published rules.

``c10/cuda/CUDACachingAllocator.cpp`` with default settings, one stream: sizes are rounded to 512 bytes, small requests
share segments of 2 MiB, middle ones of 20 MiB, large ones get multiples of 2 MiB; the smallest free block that is large
enough is taken and split; neighbours that are free become one. Segments are never given back before memory runs out,
and running out counts as not fitting, so that is the end here.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

MIB = 2**20
ROUND_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
MIDDLE_BYTES, MIDDLE_SEGMENT_BYTES = 10 * MIB, 20 * MIB
LARGE_ROUND_BYTES = 2 * MIB
_SPLIT_REMAINDER_BYTES = {True: ROUND_BYTES, False: SMALL_BYTES + 1}
"""A block is split where at least so much is left over; by whether the pool is the small one."""


@dataclass(slots=True, kw_only=True)
class _Block:
    address: int
    size_bytes: int
    small: bool
    before: "_Block | None" = None
    after: "_Block | None" = None
    free: bool = True


@dataclass(slots=True)
class CachingAllocator:
    """One device's allocator."""

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    _next_address: int = 0
    _pools: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    """Free blocks by size, then address; one pool for small requests, one for the others."""

    def allocate(self, asked_bytes: int) -> _Block:
        """Take a block."""
        size = rounded_bytes(asked_bytes)
        small = size <= SMALL_BYTES
        block = self._find(size, small) or self._reserve(size, small)
        if block.size_bytes - size >= _SPLIT_REMAINDER_BYTES[small]:
            rest = _Block(
                address=block.address + size,
                size_bytes=block.size_bytes - size,
                small=small,
                before=block,
                after=block.after,
            )
            if block.after is not None:
                block.after.before = rest
            block.after, block.size_bytes = rest, size
            self._put(rest)
        block.free = False
        self.allocated_bytes += block.size_bytes
        return block

    def release(self, block: _Block) -> None:
        """Give a block back, and merge it with free neighbours."""
        self.allocated_bytes -= block.size_bytes
        block.free = True
        before, after = block.before, block.after
        if before is not None and before.free:
            self._take(before)
            before.size_bytes += block.size_bytes
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            self._take(after)
            block.size_bytes += after.size_bytes
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self._put(block)

    def _find(self, size: int, small: bool) -> _Block | None:
        pool = self._pools[small]
        place = bisect.bisect_left(pool, size, key=_size_of)
        return pool.pop(place)[2] if place < len(pool) else None

    def _reserve(self, size: int, small: bool) -> _Block:
        segment = segment_bytes(size)
        self.reserved_bytes += segment
        block = _Block(address=self._next_address, size_bytes=segment, small=small)
        self._next_address += segment
        return block

    def _put(self, block: _Block) -> None:
        bisect.insort(self._pools[block.small], (block.size_bytes, block.address, block), key=_place_of)

    def _take(self, block: _Block) -> None:
        pool = self._pools[block.small]
        place = bisect.bisect_left(pool, (block.size_bytes, block.address), key=_place_of)
        del pool[place]


def rounded_bytes(asked_bytes: int) -> int:
    """What a request becomes."""
    return max(ROUND_BYTES, -(-asked_bytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(size_bytes: int) -> int:
    """What is asked of the device for a rounded request that no free block serves."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < MIDDLE_BYTES:
        return MIDDLE_SEGMENT_BYTES
    return -(-size_bytes // LARGE_ROUND_BYTES) * LARGE_ROUND_BYTES


def reserve(sizes_bytes: Sequence[int], events: Sequence[int]) -> int:
    """Play a sequence of allocations: bytes of the device that are reserved in the end, which is also the most.

    Args:
        sizes_bytes: Of each allocation.
        events: ``i``: allocation i is made; ``-1 - i``: it is released.
    """
    allocator = CachingAllocator()
    blocks: dict[int, _Block] = {}
    for event in events:
        if event < 0:
            allocator.release(blocks.pop(-1 - event))
        else:
            blocks[event] = allocator.allocate(sizes_bytes[event])
    return allocator.reserved_bytes


def _size_of(entry: tuple[int, int, _Block]) -> int:
    return entry[0]


def _place_of(entry: tuple[int, int, _Block] | tuple[int, int]) -> tuple[int, int]:
    return entry[0], entry[1]
