"""Enforcement of a memory budget: a step beyond it fails as on a smaller device.

On a GPU, a separate block holds the memory beyond the budget; on a CPU, the kernel
enforces a resource limit. Whether a step fits must not depend on chance, so the
allocators of a CPU's process are brought into the same state first.
"""

import contextlib
import ctypes
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from autotune.base.units import format_bytes
from trainer.distributed.ranks import Ranks, warm_up_libraries
from trainer.errors import DeviceMissing
from trainer.record.process_memory import status_bytes

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
_EMPTY_BYTES_BYTES = sys.getsizeof(b"")
"""Size of an empty ``bytes`` object; each byte of content adds one."""
_OBJECTS_PER_POOL = 32
"""Objects of the largest size in a pool, rounded up."""
_MOST_OBJECTS = 2**17
"""Most objects that are made to fill the memory that Python's allocator holds."""
_KEPT_OBJECTS: list[list[bytes]] = []
"""Objects that fill Python's allocator until the process ends."""

_GPU_PAGE_BYTES = 2**21
"""Granularity of device memory."""


def keep_one_arena() -> None:
    """Make malloc serve all threads from one heap.

    Otherwise each thread makes a heap when it first allocates, which takes 64 MiB of
    address space, used or not. Call this before there is a second thread.
    """
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_large_blocks(least_bytes: int) -> ctypes.CDLL:
    """Make malloc return freed blocks of at least ``least_bytes`` to the kernel.

    Returns:
        The C library, for further calls.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, least_bytes)
    return libc


def enforce(
    budget_bytes: int | None,
    ranks: Ranks,
    device_used_before_bytes: int | None,
    *,
    large_block_bytes: int = LARGE_BLOCK_BYTES,
    clean: bool = False,
) -> "Budget":
    """Start to enforce the memory budget of one rank.

    Args:
        budget_bytes: The budget; None only measures.
        ranks: Ranks that have joined: memory for their communication does not count as
            the model's.
        device_used_before_bytes: Memory in use on this rank's GPU before this process,
            from NVML; None on a CPU or if unknown.
        large_block_bytes: Size from which freed blocks go back to the kernel, on a CPU.
        clean: True to leave no memory free in the allocators before the step. The free
            memory depends on the process's past, which differs between trials.

    Raises:
        DeviceMissing: If the GPU is a MIG slice: NVML's figures, by which a budget is
            chosen, are those of the whole GPU.
    """
    # Some drivers do not report MIG; only the device name then shows it.
    if "MIG " in ranks.device_name:
        raise DeviceMissing(
            f"{ranks.device_name!r} is a MIG slice, but NVML reports the memory of the"
            " whole GPU",
            next_step=(
                "Select a GPU without MIG (CUDA_VISIBLE_DEVICES), disable MIG"
                " (nvidia-smi -i INDEX -mig 0), or use --device cpu."
            ),
        )
    # Memory that libraries take when opened is not the model's.
    warm_up_libraries(ranks)
    if ranks.device.type == "cuda":
        if clean:
            # cuBLAS keeps its workspaces in PyTorch's allocator, and no public function
            # of torch frees them.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return CudaBudget(budget_bytes, ranks.device, device_used_before_bytes)
    return CpuBudget(budget_bytes, large_block_bytes, clean=clean)


def _fill_heap(libc: ctypes.CDLL) -> None:
    """Take all free blocks of malloc's heap, and never free them.

    They differ between processes, and a step could use them without a new allocation
    that counts for the limit.
    """
    libc.sbrk.restype = ctypes.c_void_p
    for block_bytes in _HEAP_BLOCK_BYTES:
        heap_end = libc.sbrk(0)
        # Not until the heap grows, as it may be unable to.
        for _ in range(_MOST_FREE_BYTES // block_bytes):
            libc.malloc(block_bytes)
            # The heap has grown, so no free block of this size was left.
            if libc.sbrk(0) != heap_end:
                break
    # Give back the end of the heap, by which it has just grown.
    libc.malloc_trim(0)


def _fill_python_allocator() -> None:
    """Take the free memory of Python's own allocator, and leave a fixed amount.

    The free memory differs between processes. So objects of the largest size are made
    until the allocator takes a new arena, then objects of each other size until one
    lies in that arena too: then no older pool of that size has room.
    """
    # Full length at once: a list that grows takes memory as well.
    objects: list[bytes] = [b""] * _MOST_OBJECTS
    _KEPT_OBJECTS.append(objects)
    # All loops below share the iterator, so that each object has its own index.
    indices = iter(range(_MOST_OBJECTS))
    index = _take_arena(objects, indices)
    # The arena has just been taken, so the last object lies in one of its first pools.
    # In CPython, the id of an object is its address.
    arena_start = id(objects[index]) - 4 * _POOL_BYTES
    arena = range(arena_start, arena_start + _ARENA_BYTES)
    for object_bytes in range(
        _SMALLEST_OBJECT_BYTES, _LARGEST_OBJECT_BYTES, _OBJECT_STEP_BYTES
    ):
        for index in indices:
            objects[index] = bytes(object_bytes - _EMPTY_BYTES_BYTES)
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
        indices: Indices in the list that are still free.

    Returns:
        The index of the last object.
    """
    before_bytes = status_bytes("VmSize")
    index = len(objects)
    arena_taken = False
    for index in indices:
        objects[index] = bytes(_LARGEST_OBJECT_BYTES - _EMPTY_BYTES_BYTES)
        # Reading the size of the process takes time, so only once a pool.
        if index % _OBJECTS_PER_POOL == _OBJECTS_PER_POOL - 1:
            # An object of another size may have made the allocator take the arena. A
            # pool later, objects of this size have a pool in it too.
            if arena_taken:
                break
            arena_taken = status_bytes("VmSize") >= before_bytes + _ARENA_BYTES
    return index


class CpuBudget:
    """Memory budget on a CPU, which begins when this object is made.

    The kernel enforces it as ``RLIMIT_DATA``: the process's memory so far plus the
    budget.
    """

    non_pytorch_bytes = None
    """None, as a CPU has no such memory."""

    def __init__(
        self,
        budget_bytes: int | None,
        large_block_bytes: int = LARGE_BLOCK_BYTES,
        *,
        clean: bool = False,
    ) -> None:
        """Set the limit; arguments are as for ``enforce``."""
        if budget_bytes is not None:
            # Large blocks go back to the kernel when freed: without this the same step
            # needs a different amount in different runs, and the largest micro-batch
            # would be a matter of luck.
            libc = return_large_blocks(large_block_bytes)
            if clean:
                # The heap grows by pages, not by 128 KiB that only some runs need.
                libc.mallopt(_M_TOP_PAD, 0)
                _fill_python_allocator()
                _fill_heap(libc)
            _, hard_limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)
            # The soft limit alone, so that it can be lifted to write the result after
            # an out of memory.
            soft_limit_bytes = status_bytes("VmData") + budget_bytes
            resource.setrlimit(
                resource.RLIMIT_DATA, (soft_limit_bytes, hard_limit_bytes)
            )
        self._size_before_bytes = status_bytes("VmSize")
        self._data_before_bytes = status_bytes("VmData")
        self._resident_before_bytes = status_bytes("VmRSS")
        self.host_peak_bytes = self._resident_before_bytes
        """Highest resident memory of the process up to the last ``take_step_peak``."""

    def peak_bytes(self) -> int:
        """Return the highest growth of the limited part of the address space.

        The kernel keeps a peak of the whole address space only. The present growth of
        its unlimited part, such as shared memory, is subtracted from that.
        """
        size_growth_bytes = status_bytes("VmSize") - self._size_before_bytes
        data_growth_bytes = status_bytes("VmData") - self._data_before_bytes
        unlimited_growth_bytes = max(0, size_growth_bytes - data_growth_bytes)
        peak_growth_bytes = status_bytes("VmPeak") - self._size_before_bytes
        return max(0, peak_growth_bytes - unlimited_growth_bytes)

    def take_step_peak(self) -> int:
        """Return the highest growth of resident memory since this object was made.

        The peak is that since the last call; no other peak can be reset.
        """
        resident_bytes = status_bytes("VmHWM")
        self.host_peak_bytes = max(self.host_peak_bytes, resident_bytes)
        # If the kernel cannot reset the peak, the next is the highest so far.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return max(0, resident_bytes - self._resident_before_bytes)

    def kept_bytes(self) -> int:
        """Return the growth of the memory that is in use now."""
        return max(0, status_bytes("VmData") - self._data_before_bytes)

    def check(self) -> None:
        """Do nothing: under the kernel's limit no allocation beyond it succeeds."""


class CudaBudget:
    """Memory budget on a GPU, which begins when this object is made.

    A block outside PyTorch's allocator holds all memory beyond the budget.
    ``torch.cuda.set_per_process_memory_fraction`` would fail too early: it counts a
    whole request, although the free end of an expandable segment serves most of it.
    With it, BERT-base would seem to fit 413 sequences instead of 427, and 1,370 instead
    of 1,568 with activation checkpointing.
    """

    host_peak_bytes = 0
    """0, as host memory is not limited on a GPU."""

    def __init__(
        self,
        budget_bytes: int | None,
        device: torch.device,
        used_before_bytes: int | None,
    ) -> None:
        """Hold the memory beyond the budget.

        Args:
            budget_bytes: The budget; None only measures.
            device: The GPU.
            used_before_bytes: Memory in use on the GPU before this process, from NVML;
                None if unknown.
        """
        self._budget_bytes = budget_bytes
        self._device = device
        self._used_before_bytes = used_before_bytes
        self._held_bytes = 0
        self._highest_reserved_bytes = 0
        """Highest reserve before the allocator's peaks were last reset."""
        self._highest_non_pytorch_bytes = max(0, self._present_non_pytorch_bytes())
        if budget_bytes is not None:
            self._hold_memory_beyond(budget_bytes)
        torch.cuda.reset_peak_memory_stats(device)

    def _hold_memory_beyond(self, budget_bytes: int) -> None:
        """Hold free memory until as much is left as the budget still allows."""
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        room_bytes = (
            budget_bytes
            - self._highest_non_pytorch_bytes
            - torch.cuda.memory_reserved(self._device)
        )
        beyond_bytes = max(0, free_bytes - max(0, room_bytes))
        # Rounded up, to leave no memory beyond the budget; at most all of the free
        # memory.
        beyond_pages = math.ceil(beyond_bytes / _GPU_PAGE_BYTES)
        free_pages = free_bytes // _GPU_PAGE_BYTES
        self._held_bytes = min(beyond_pages, free_pages) * _GPU_PAGE_BYTES
        hold_device_memory(self._held_bytes)

    @property
    def non_pytorch_bytes(self) -> int:
        """Highest non-PyTorch memory so far."""
        self._highest_non_pytorch_bytes = max(
            self._highest_non_pytorch_bytes, self._present_non_pytorch_bytes()
        )
        return self._highest_non_pytorch_bytes

    def peak_bytes(self) -> int:
        """Return the allocator's highest reserve plus non-PyTorch memory."""
        return self._peak_reserved_bytes() + self.non_pytorch_bytes

    def take_step_peak(self) -> int:
        """Return the most memory that the allocator gave out since the last call."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        # The reset below would lose this peak.
        self._highest_reserved_bytes = self._peak_reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_bytes

    def kept_bytes(self) -> int:
        """Return the memory that the allocator has given out."""
        return torch.cuda.memory_allocated(self._device)

    def _peak_reserved_bytes(self) -> int:
        """Return the allocator's highest reserve since this object was made."""
        return max(
            self._highest_reserved_bytes, torch.cuda.max_memory_reserved(self._device)
        )

    def check(self) -> None:
        """Check that the steps so far fit the budget, and would do so again.

        Raises:
            torch.OutOfMemoryError: If the allocator failed or had to free cached
                blocks, or if the peak exceeds the budget.
        """
        counts = torch.cuda.memory_stats(self._device)
        if counts.get("num_ooms", 0):
            raise torch.OutOfMemoryError(
                "an allocation failed, and the code continued without it"
            )
        if counts.get("num_alloc_retries", 0):
            raise torch.OutOfMemoryError(
                "the allocator had to free cached blocks and retry"
            )
        if self._budget_bytes is None:
            return
        beyond_bytes = self.peak_bytes() - self._budget_bytes
        if beyond_bytes > 0:
            raise torch.OutOfMemoryError(
                f"the peak exceeds the budget by {format_bytes(beyond_bytes)}:"
                f" {format_bytes(self._peak_reserved_bytes())} in PyTorch's allocator"
                f" and {format_bytes(self.non_pytorch_bytes)} of non-PyTorch memory"
            )

    def _present_non_pytorch_bytes(self) -> int:
        """Return the non-PyTorch memory that is in use now."""
        if self._used_before_bytes is None:
            # All memory outside the allocator counts, that of other programs too.
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            used_bytes = total_bytes - free_bytes
        else:
            # NVML before and after: CUDA's own count omits the driver's reserve.
            used_bytes = (
                torch.cuda.device_memory_used(self._device) - self._used_before_bytes
            )
        return used_bytes - torch.cuda.memory_reserved(self._device) - self._held_bytes


Budget = CpuBudget | CudaBudget
"""Memory budget that is enforced from its creation on, and records the peak."""


def hold_device_memory(size_bytes: int) -> None:
    """Hold memory of the current CUDA device until this process ends.

    Raises:
        RuntimeError: If the device has less.
    """
    if not size_bytes:
        return
    address = ctypes.c_uint64()
    error_code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(
        ctypes.byref(address), ctypes.c_size_t(size_bytes)
    )
    if error_code:
        raise RuntimeError(
            f"cannot reserve {format_bytes(size_bytes)} of the GPU: cuMemAlloc"
            f" returned {error_code}"
        )
