"""Memory budgets that hold to a page of the GPU, and to some KiB on a CPU."""

import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from autotune.trials.jobs import budget
from autotune.trials.jobs.budget import CudaBudget

MIB = 2**20
GIB = 2**30
PAGE_BYTES = 2 * MIB
"""Granularity of a GPU's memory."""
GPU_BYTES = 80 * GIB
BUDGET_BYTES = 40 * GIB
DEVICE = torch.device("cuda", 0)
# Memory in use on the GPU before a trial, in which nothing is allocated yet.
OTHERS_BYTES = 256 * MIB
"""Memory of other programs."""
NON_PYTORCH_BYTES = 512 * MIB
RESERVED_BYTES = GIB


@dataclass(slots=True, kw_only=True)
class GpuMemory:
    """Memory of a GPU, as torch and NVML report it; tests change it as a step would."""

    non_pytorch_bytes: int = NON_PYTORCH_BYTES
    reserved_bytes: int = RESERVED_BYTES
    peak_reserved_bytes: int = RESERVED_BYTES
    held_bytes: int = 0
    """Memory that the budget holds."""
    stats: dict[str, int] = field(default_factory=dict)
    """Counts of the allocator."""

    @property
    def used_bytes(self) -> int:
        own_bytes = self.non_pytorch_bytes + self.reserved_bytes + self.held_bytes
        return OTHERS_BYTES + own_bytes

    @property
    def free_bytes(self) -> int:
        return GPU_BYTES - self.used_bytes

    def hold(self, size_bytes: int) -> None:
        self.held_bytes = size_bytes


@pytest.fixture
def gpu(monkeypatch):
    """Let ``CudaBudget`` see a scripted GPU."""
    memory = GpuMemory()
    fakes = {
        "memory_reserved": lambda device: memory.reserved_bytes,
        "max_memory_reserved": lambda device: memory.peak_reserved_bytes,
        "device_memory_used": lambda device: memory.used_bytes,
        "memory_stats": lambda device: memory.stats,
        "mem_get_info": lambda device: (memory.free_bytes, GPU_BYTES),
        "reset_peak_memory_stats": lambda device: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(budget, "hold_device_memory", memory.hold)
    return memory


@pytest.mark.parametrize(
    "bytes_below",
    [
        pytest.param(0, id="whole pages"),
        pytest.param(1, id="a byte less"),
        pytest.param(PAGE_BYTES // 2, id="half a page less"),
        pytest.param(PAGE_BYTES - 1, id="a page less, but for a byte"),
    ],
)
def test_holds_gpu_memory_beyond_the_budget(gpu, bytes_below):
    budget_bytes = BUDGET_BYTES - bytes_below
    limited = CudaBudget(budget_bytes, DEVICE, OTHERS_BYTES)
    room_bytes = budget_bytes - NON_PYTORCH_BYTES - RESERVED_BYTES
    assert 0 <= room_bytes - gpu.free_bytes < PAGE_BYTES
    assert limited.non_pytorch_bytes == NON_PYTORCH_BYTES


@pytest.mark.parametrize(
    "budget_bytes",
    [
        pytest.param(None, id="no budget"),
        pytest.param(GPU_BYTES + 10 * GIB, id="budget beyond the GPU"),
    ],
)
def test_holds_nothing_unless_memory_exceeds_the_budget(gpu, budget_bytes):
    CudaBudget(budget_bytes, DEVICE, OTHERS_BYTES)
    assert gpu.held_bytes == 0


def test_exhausted_budget_leaves_less_than_a_page(gpu):
    # So the free memory is no whole number of pages.
    gpu.non_pytorch_bytes += 1
    CudaBudget(RESERVED_BYTES, DEVICE, OTHERS_BYTES)
    assert 0 <= gpu.free_bytes < PAGE_BYTES


def test_other_programs_count_without_nvml(gpu):
    limited = CudaBudget(BUDGET_BYTES, DEVICE, None)
    assert limited.non_pytorch_bytes == NON_PYTORCH_BYTES + OTHERS_BYTES
    assert gpu.held_bytes > 0


def test_peak_includes_growth_outside_the_allocator(gpu):
    limited = CudaBudget(BUDGET_BYTES, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = 30 * GIB
    gpu.non_pytorch_bytes = GIB
    assert limited.peak_bytes() == 30 * GIB + GIB


def test_freed_memory_stays_part_of_the_peak(gpu):
    limited = CudaBudget(BUDGET_BYTES, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = 30 * GIB
    gpu.non_pytorch_bytes = GIB
    assert limited.non_pytorch_bytes == GIB
    gpu.non_pytorch_bytes = NON_PYTORCH_BYTES
    assert limited.non_pytorch_bytes == GIB
    assert limited.peak_bytes() == 30 * GIB + GIB


def test_peak_beyond_the_budget_does_not_fit(gpu):
    limited = CudaBudget(BUDGET_BYTES, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = BUDGET_BYTES - NON_PYTORCH_BYTES
    limited.check()
    gpu.non_pytorch_bytes += 256 * MIB
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"exceeds the budget by 256 MiB: 39\.5 GiB in .* and 768 MiB of",
    ):
        limited.check()


def test_step_that_fits_only_by_a_retry_does_not_fit(gpu):
    limited = CudaBudget(None, DEVICE, OTHERS_BYTES)
    limited.check()
    gpu.stats["num_alloc_retries"] = 1
    with pytest.raises(torch.OutOfMemoryError, match="retry"):
        limited.check()


# ``bytes`` of length 479 are the largest that Python's own allocator serves, from pools
# of 31 objects; an arena has 64 pools. Malloc's heap serves 100,000 bytes, which are
# below LARGE_BLOCK_BYTES.
GROWTH_AFTER_CLEANING = """
from autotune.trials.jobs import budget
from trainer.record.process_memory import status_bytes

OBJECTS_PER_ARENA = 64 * 31
kept = []

def growth_bytes(count, length):
    before_bytes = status_bytes("VmSize")
    kept.append([bytes(length) for _ in range(count)])
    return status_bytes("VmSize") - before_bytes

# Leave free memory in many pools, as a trial's past may.
fragmented = [bytes(479) for _ in range(20_000)]
del fragmented[::2]
budget.CpuBudget(2**40, clean=True)
print(
    growth_bytes(OBJECTS_PER_ARENA, 479),
    growth_bytes(OBJECTS_PER_ARENA, 479),
    growth_bytes(1, 100_000),
)
"""


def test_allocators_have_equal_room_in_every_trial():
    """Check the memory that cleaning leaves free in a process with a past.

    Python's allocator has nearly an arena free, and the heap of malloc has nothing.
    Otherwise the needs of equal trials would differ by 1 MiB of Python's allocator, and
    by 128 KiB of the heap, depending on where they are forked.
    """
    process = subprocess.run(
        [sys.executable, "-c", GROWTH_AFTER_CLEANING],
        capture_output=True,
        text=True,
        check=True,
    )
    first_arena_bytes, second_arena_bytes, block_bytes = map(
        int, process.stdout.split()
    )
    # The first objects fit into the free room, but for their list and some pages.
    assert first_arena_bytes < 32 * 1024
    # The next ones need an arena of their own.
    assert second_arena_bytes >= MIB
    # The heap grows by the block itself, rounded to pages.
    assert 90_000 < block_bytes < 110_000
