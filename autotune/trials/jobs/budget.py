"""Enforcement of a memory budget: a step beyond it fails as on a smaller device.

On a GPU, a separate block holds the memory beyond the budget; on a CPU, the kernel
enforces a resource limit. Whether a step fits must not depend on chance, so the
allocators of a CPU's process are brought into the same state first
(``cpu_allocators``).
"""

import contextlib
import ctypes
import math
import resource
from pathlib import Path

import torch

from autotune.base.units import format_bytes
from autotune.trials.jobs.cpu_allocators import (
    LARGE_BLOCK_BYTES,
    clean_allocators,
    return_large_blocks,
)
from trainer.formats.errors import DeviceMissing
from trainer.formats.process_status import status_bytes

_GPU_PAGE_BYTES = 2**21
"""Granularity of device memory."""


def enforce(
    budget_bytes: int | None,
    device: torch.device,
    device_used_before_bytes: int | None,
    *,
    large_block_bytes: int = LARGE_BLOCK_BYTES,
    clean: bool = False,
) -> "Budget":
    """Start to enforce the memory budget of one rank.

    Args:
        budget_bytes: The budget; None only measures.
        device: Device of the rank. Memory that libraries have taken by now does not
            count as the model's.
        device_used_before_bytes: Memory in use on this rank's GPU before this process,
            from NVML; None on a CPU or if unknown.
        large_block_bytes: Size from which freed blocks go back to the kernel, on a CPU.
        clean: True to leave no memory free in the allocators before the step. How much
            is free depends on the process's past, which differs between trials.

    Raises:
        DeviceMissing: If the GPU is a MIG slice: NVML's figures, by which a budget is
            chosen, are those of the whole GPU.
    """
    reject_mig_slice(device)
    if device.type == "cuda":
        if clean:
            # cuBLAS keeps its workspaces in PyTorch's allocator. A private function, as
            # no public one of torch frees them.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return CudaBudget(budget_bytes, device, device_used_before_bytes)
    return CpuBudget(budget_bytes, large_block_bytes, clean=clean)


def reject_mig_slice(device: torch.device) -> None:
    """Reject a MIG slice; call it before work on the GPU.

    Raises:
        DeviceMissing: If the device is one.
    """
    if device.type != "cuda":
        return
    # Some drivers do not report MIG; only the device name then shows it.
    name = torch.cuda.get_device_name(device)
    if "MIG " in name:
        raise DeviceMissing(
            f"{name!r} is a MIG slice, but NVML reports the memory of the whole GPU",
            next_step=(
                "Select a GPU without MIG (CUDA_VISIBLE_DEVICES), disable MIG"
                " (nvidia-smi -i INDEX -mig 0), or use --device cpu."
            ),
        )


class CpuBudget:
    """Memory budget on a CPU, which begins when this object is made.

    The kernel enforces it as ``RLIMIT_DATA``: the process's memory so far plus the
    budget.
    """

    non_pytorch_bytes = None
    """``CudaBudget`` has a figure; a CPU has no such memory."""

    def __init__(
        self,
        budget_bytes: int | None,
        large_block_bytes: int = LARGE_BLOCK_BYTES,
        *,
        clean: bool = False,
    ) -> None:
        """Set the limit; arguments are as for ``enforce``."""
        if budget_bytes is not None:
            # Otherwise the same step needs a different amount of memory in different
            # runs, and the largest micro-batch size would be a matter of luck.
            return_large_blocks(large_block_bytes)
            if clean:
                clean_allocators()
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
        """Return the peak of resident memory since the last call, and reset it.

        The peak is relative to the memory at which this object was made. It is that of
        resident memory because the kernel can reset no other.
        """
        resident_bytes = status_bytes("VmHWM")
        self.host_peak_bytes = max(self.host_peak_bytes, resident_bytes)
        # If the kernel cannot reset the peak, the next call returns the highest so far.
        with contextlib.suppress(OSError):
            # 5 resets the peak of resident pages, ``VmHWM``.
            Path("/proc/self/clear_refs").write_text("5")
        return max(0, resident_bytes - self._resident_before_bytes)

    def kept_bytes(self) -> int:
        """Return the growth of the limited memory that is in use now."""
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
            # Both figures are from NVML: CUDA's own count leaves out the driver's
            # reserve.
            used_bytes = (
                torch.cuda.device_memory_used(self._device) - self._used_before_bytes
            )
        return used_bytes - torch.cuda.memory_reserved(self._device) - self._held_bytes


Budget = CpuBudget | CudaBudget
"""Memory budget that is enforced from its creation on, and records the peak."""


def lift_memory_limit() -> None:
    """Lift the limit of a memory budget, as writing a result needs memory, too."""
    _, hard_limit_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard_limit_bytes, hard_limit_bytes))


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
