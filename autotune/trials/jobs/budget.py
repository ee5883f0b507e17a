"""Enforcement of a memory budget: by the memory that a GPU has left, by a resource limit on a CPU."""

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from autotune.base.units import format_bytes
from trainer.distributed.ranks import Ranks, open_libraries
from trainer.errors import DeviceMissing
from trainer.record.meter import status_bytes

_M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -2, -3, -8
LARGE_BLOCK_BYTES = 128 * 1024
_MOST_FREE_BYTES = 2**24
"""Most free memory of a heap that is filled, for each size of blocks."""
_ARENA_BYTES, _MOST_OBJECTS = 2**20, 2**17
"""Memory that Python's allocator takes at once, and most objects that are made to fill
what it has."""
_POOL_BYTES = 2**14
_LARGEST_SMALL_BYTES = 512 - sys.getsizeof(b"")
_KEPT: list[list[bytes]] = []
_PAGE_BYTES = 2**21
"""Granularity of device memory."""


def keep_one_arena() -> None:
    """Make malloc serve all threads from one heap.

    Call it before there is a second thread.

    Each further heap takes 64 MiB of address space, used or not, and is made when a
    thread first allocates.
    """
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def return_large_blocks(least_bytes: int) -> ctypes.CDLL:
    """Make malloc return blocks of at least ``least_bytes`` to the kernel when they are freed; return the C library."""
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
    """Start to enforce a memory budget of one rank; None only measures.

    ``ranks`` have joined: memory for their communication does not count as the model's.
    ``device_used_before_bytes`` is the memory in use on this rank's GPU before this
    process, from NVML; None on a CPU or if unknown. On a CPU, blocks of at least
    ``large_block_bytes`` go back to the kernel when they are freed; ``clean`` leaves
    nothing free in the allocator, as fragmentation depends on what came first. Raise
    ``DeviceMissing`` if the GPU is a MIG slice: NVML's figures, by which a budget is
    chosen, are those of the whole.
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
    open_libraries(ranks)  # what they take is not counted as the model's
    if ranks.device.type == "cuda":
        if clean:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return CudaBudget(budget_bytes, ranks.device, device_used_before_bytes)
    return CpuBudget(budget_bytes, large_block_bytes, clean=clean)


def _fill_heap(libc: ctypes.CDLL) -> None:
    """Take the free blocks of the heap, which differ between processes and would be free room beyond the limit."""
    libc.sbrk.restype = ctypes.c_void_p
    for size in (2**exponent for exponent in range(14, 4, -1)):
        end = libc.sbrk(0)
        for _ in range(_MOST_FREE_BYTES // size):  # the heap may be unable to grow
            libc.malloc(size)
            if libc.sbrk(0) != end:
                break
    libc.malloc_trim(0)


def _fill_arenas() -> None:
    """Take the free places of Python's own allocator, which differ between processes, and leave new ones.

    It serves objects of up to 512 bytes from pools of one size, and takes memory for 64
    pools at once.
    """
    # Full length at once: a list that grows takes memory as well.
    kept: list[bytes] = [b""] * _MOST_OBJECTS
    _KEPT.append(kept)
    places = iter(range(_MOST_OBJECTS))
    place = _fill_arena(kept, places)
    first = id(kept[place]) - 4 * _POOL_BYTES
    arena = range(first, first + _ARENA_BYTES)
    for size in range(48, 512, 16):
        for place in places:
            kept[place] = bytes(size - sys.getsizeof(b""))
            if id(kept[place]) in arena:
                break
    # Most of another: what a step needs differs by a few pools, which must not be an
    # arena for some processes only.
    for spare in range(place + 1, _fill_arena(kept, places)):
        kept[spare] = b""


def _fill_arena(kept: list[bytes], places: Iterator[int]) -> int:
    """Make objects of the largest size until Python's allocator takes an arena.

    Return the place of the last.
    """
    before_bytes, place, taken = status_bytes("VmSize"), len(kept), False
    for place in places:
        kept[place] = bytes(_LARGEST_SMALL_BYTES)
        if place % 32 == 31:
            # 32 objects ago, maybe by another size: this size has a pool of it now.
            if taken:
                break
            taken = status_bytes("VmSize") >= before_bytes + _ARENA_BYTES
    return place


class CpuBudget:
    """Memory budget on a CPU: the kernel enforces ``RLIMIT_DATA``, the process's memory so far plus the budget."""

    non_pytorch_bytes = None

    def __init__(
        self,
        budget_bytes: int | None,
        large_block_bytes: int = LARGE_BLOCK_BYTES,
        *,
        clean: bool = False,
    ) -> None:
        if budget_bytes is not None:
            # Large blocks go back to the kernel when freed: without this the same step
            # needs a different amount in different runs, and the largest micro-batch
            # would be a matter of luck.
            libc = return_large_blocks(large_block_bytes)
            if clean:
                # The heap grows by pages, not by 128 KiB that only some runs need.
                libc.mallopt(_M_TOP_PAD, 0)
                _fill_arenas()
                _fill_heap(libc)
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            # The soft limit alone, so that it can be lifted to write the account of an
            # OOM.
            resource.setrlimit(
                resource.RLIMIT_DATA, (status_bytes("VmData") + budget_bytes, hard)
            )
        self._before_bytes, self._data_before_bytes = (
            status_bytes("VmSize"),
            status_bytes("VmData"),
        )
        self._resident_before_bytes = self.host_peak_bytes = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Return the highest growth of the limited part of the address space, of which the kernel keeps no peak."""
        beyond_bytes = (
            status_bytes("VmSize")
            - status_bytes("VmData")
            - self._before_bytes
            + self._data_before_bytes
        )
        return max(
            0, status_bytes("VmPeak") - self._before_bytes - max(0, beyond_bytes)
        )

    def take_step_peak(self) -> int:
        """Return the highest growth of resident memory since the last call.

        Other peaks cannot be reset.
        """
        resident_bytes = status_bytes("VmHWM")
        self.host_peak_bytes = max(self.host_peak_bytes, resident_bytes)
        with contextlib.suppress(OSError):  # then it is the highest so far
            Path("/proc/self/clear_refs").write_text("5")
        return max(0, resident_bytes - self._resident_before_bytes)

    def kept_bytes(self) -> int:
        """Return the growth of the memory that is in use now."""
        return max(0, status_bytes("VmData") - self._data_before_bytes)

    def check(self) -> None:
        """Do nothing: the kernel's limit is exact, so no allocation beyond it succeeds."""


class CudaBudget:
    """Memory budget on a GPU: a block outside of PyTorch's allocator holds the memory beyond it.

    ``torch.cuda.set_per_process_memory_fraction`` would fail too early: it counts a
    whole request, although the free end of an expandable segment serves most of it.
    BERT-base would seem to fit 413 sequences instead of 427, and 1,370 instead of 1,568
    with checkpointing.
    """

    host_peak_bytes = 0

    def __init__(
        self,
        budget_bytes: int | None,
        device: torch.device,
        used_before_bytes: int | None,
    ) -> None:
        self._budget_bytes, self._device, self._used_before_bytes = (
            budget_bytes,
            device,
            used_before_bytes,
        )
        self._held_bytes = self._reserved_bytes = 0
        self._outside_bytes = max(0, self._outside_now_bytes())
        if budget_bytes is not None:
            free_bytes, _ = torch.cuda.mem_get_info(device)
            room_bytes = (
                budget_bytes - self._outside_bytes - torch.cuda.memory_reserved(device)
            )
            beyond_bytes = max(0, free_bytes - max(0, room_bytes))
            # Rounded up, to leave no memory beyond the budget; at most all of the free
            # memory.
            self._held_bytes = (
                min(-(-beyond_bytes // _PAGE_BYTES), free_bytes // _PAGE_BYTES)
                * _PAGE_BYTES
            )
            hold_device_memory(self._held_bytes)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def non_pytorch_bytes(self) -> int:
        """Highest non-PyTorch memory so far."""
        self._outside_bytes = max(self._outside_bytes, self._outside_now_bytes())
        return self._outside_bytes

    def peak_bytes(self) -> int:
        """Return the allocator's highest reserve plus non-PyTorch memory."""
        return self._most_reserved_bytes() + self.non_pytorch_bytes

    def take_step_peak(self) -> int:
        """Return the most that the allocator gave out since the last call."""
        peak_bytes = torch.cuda.max_memory_allocated(self._device)
        self._reserved_bytes = self._most_reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_bytes

    def kept_bytes(self) -> int:
        """Return the memory that the allocator has given out."""
        return torch.cuda.memory_allocated(self._device)

    def _most_reserved_bytes(self) -> int:
        return max(self._reserved_bytes, torch.cuda.max_memory_reserved(self._device))

    def check(self) -> None:
        """Raise ``OutOfMemoryError`` if the allocator freed cached blocks or failed, or the peak exceeds the budget."""
        counts = torch.cuda.memory_stats(self._device)
        if counts.get("num_ooms", 0):
            raise torch.OutOfMemoryError(
                "an allocation failed, and the code continued without it"
            )
        if counts.get("num_alloc_retries", 0):
            raise torch.OutOfMemoryError(
                "the allocator had to free cached blocks and retry"
            )
        if (
            self._budget_bytes is not None
            and (beyond_bytes := self.peak_bytes() - self._budget_bytes) > 0
        ):
            raise torch.OutOfMemoryError(
                f"the peak exceeds the budget by {format_bytes(beyond_bytes)}:"
                f" {format_bytes(self._most_reserved_bytes())} in PyTorch's allocator"
                f" and {format_bytes(self.non_pytorch_bytes)} of non-PyTorch memory"
            )

    def _outside_now_bytes(self) -> int:
        if self._used_before_bytes is None:
            # All memory outside the allocator counts, that of other programs too.
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._device)
            used_bytes = all_bytes - free_bytes
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
    if size_bytes:
        code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(
            ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size_bytes)
        )
        if code:
            raise RuntimeError(
                f"cannot reserve {format_bytes(size_bytes)} of the GPU: cuMemAlloc"
                f" returned {code}"
            )
