"""State of malloc and of Python's allocator in a process with a memory budget on a CPU.

A step may use memory that these allocators hold free, which no limit of the kernel
counts. How much they hold depends on the process's past, so that the same step would
fit in one process and not in another. The functions here make the state the same.
"""

import ctypes
import sys
from collections.abc import Iterator

from trainer.formats.process_status import status_bytes

# Parameters of mallopt(3), from <malloc.h>.
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
LARGE_BLOCK_BYTES = 128 * 1024
"""Size from which malloc returns freed blocks to the kernel under a budget."""
_MOST_FREE_BYTES = 2**24
"""Most free memory of malloc's heap that is filled, for each size of blocks."""
_HEAP_BLOCK_BYTES = tuple(2**exponent for exponent in range(14, 4, -1))
"""Sizes of the blocks that fill malloc's heap, from 16 KiB down to 32 bytes."""

# Python's own allocator (pymalloc): it takes an arena from the kernel at once, and
# divides it into pools, each for objects of one size.
_ARENA_BYTES = 2**20
_POOL_BYTES = 2**14
_LARGEST_OBJECT_BYTES = 512
"""Size of the largest object that Python's own allocator serves."""
_SMALLEST_OBJECT_BYTES = 48
"""Size of the smallest ``bytes`` object, rounded up to a step of sizes."""
_OBJECT_STEP_BYTES = 16
"""Difference between neighbouring sizes of objects, each of which has its own pools."""
_BYTES_OBJECT_OVERHEAD = sys.getsizeof(b"")
"""Bytes of a ``bytes`` object beside those of its content."""
_OBJECTS_PER_POOL = 32
"""Objects of the largest size in a pool, rounded up."""
_MOST_OBJECTS = 2**17
"""Most objects that are made to fill the memory that Python's allocator holds."""
_KEPT_OBJECTS: list[list[bytes]] = []
"""Objects that fill Python's allocator until the process ends."""


def keep_one_arena() -> None:
    """Make malloc serve all threads from one heap.

    Otherwise each thread makes a heap when it first allocates, which takes 64 MiB of
    address space, used or not. Call this before there is a second thread.
    """
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_large_blocks(least_bytes: int) -> None:
    """Make malloc return freed blocks of at least ``least_bytes`` to the kernel."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, least_bytes)


def clean_allocators() -> None:
    """Leave no free memory in malloc's heap, and a fixed amount in Python's allocator.

    The memory that is taken for this stays in use until the process ends.
    """
    libc = ctypes.CDLL(None)
    # The heap then grows by pages, not by 128 KiB that only some runs need.
    libc.mallopt(_M_TOP_PAD, 0)
    _fill_python_allocator()
    _fill_heap(libc)


def _fill_heap(libc: ctypes.CDLL) -> None:
    """Take all free blocks of malloc's heap, and never free them."""
    libc.sbrk.restype = ctypes.c_void_p
    for block_bytes in _HEAP_BLOCK_BYTES:
        heap_end = libc.sbrk(0)
        # A limited number of blocks, as a heap that cannot grow would never end this.
        for _ in range(_MOST_FREE_BYTES // block_bytes):
            libc.malloc(block_bytes)
            if libc.sbrk(0) != heap_end:
                # The heap has grown, so no free block of this size was left.
                break
    # Give back the end of the heap, by which it has just grown.
    libc.malloc_trim(0)


def _fill_python_allocator() -> None:
    """Take the free memory of Python's own allocator, and leave a fixed amount.

    Objects of the largest size are made until the allocator takes a new arena. Then
    objects of each other size are made until one lies in that arena too, which shows
    that no older pool of the size has room.
    """
    # Full length at once: a list that grows takes memory as well.
    objects: list[bytes] = [b""] * _MOST_OBJECTS
    _KEPT_OBJECTS.append(objects)
    # All loops below share the iterator, so that each object has its own index.
    indices = iter(range(_MOST_OBJECTS))
    index = _take_arena(objects, indices)
    # The arena has just been taken, so the last object lies in one of its first four
    # pools. In CPython, the id of an object is its address.
    arena_start = id(objects[index]) - 4 * _POOL_BYTES
    arena = range(arena_start, arena_start + _ARENA_BYTES)
    for object_bytes in range(
        _SMALLEST_OBJECT_BYTES, _LARGEST_OBJECT_BYTES, _OBJECT_STEP_BYTES
    ):
        for index in indices:
            objects[index] = bytes(object_bytes - _BYTES_OBJECT_OVERHEAD)
            if id(objects[index]) in arena:
                break
    # Fill another arena, and free most of it: the memory that a step needs differs by a
    # few pools between processes, which must not make only some of them take an arena.
    last_index = _take_arena(objects, indices)
    for spare_index in range(index + 1, last_index):
        objects[spare_index] = b""


def _take_arena(objects: list[bytes], indices: Iterator[int]) -> int:
    """Make objects of the largest size until Python's allocator takes an arena.

    Args:
        objects: List to which the objects are written.
        indices: Indices in the list that are still free, in order; at least one.

    Returns:
        The index of the last object.
    """
    before_bytes = status_bytes("VmSize")
    index = len(objects)
    arena_taken = False
    for index in indices:
        objects[index] = bytes(_LARGEST_OBJECT_BYTES - _BYTES_OBJECT_OVERHEAD)
        # Reading the size of the process takes time, so only once a pool.
        if index % _OBJECTS_PER_POOL == _OBJECTS_PER_POOL - 1:
            # An object of another size may have made the allocator take the arena. A
            # pool later, objects of this size have a pool in it too.
            if arena_taken:
                break
            arena_taken = status_bytes("VmSize") >= before_bytes + _ARENA_BYTES
    return index
