"""Memory budgets that hold to the byte, and the memory of a process family."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial

import psutil
import pytest
import torch

from autotune.trials.jobs import budget, footprint
from autotune.trials.jobs.budget import CudaBudget

GIB = 2**30
MIB = 2**20
PAGE_BYTES = 2 * MIB
GPU_BYTES = 80 * GIB
DEVICE = torch.device("cuda", 0)
OTHERS_BYTES = GIB // 4
"""Memory of other programs on the GPU."""


@dataclass(slots=True, kw_only=True)
class GpuMemory:
    """Memory of a GPU, as torch and NVML report it."""

    non_pytorch_bytes: int = GIB // 2
    reserved_bytes: int = GIB
    peak_reserved_bytes: int = GIB
    held_bytes: int = 0
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def used_bytes(self):
        own_bytes = self.non_pytorch_bytes + self.reserved_bytes + self.held_bytes
        return OTHERS_BYTES + own_bytes

    @property
    def free_bytes(self):
        return GPU_BYTES - self.used_bytes


@pytest.fixture
def gpu(monkeypatch):
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
    hold = partial(setattr, memory, "held_bytes")
    monkeypatch.setattr(budget, "hold_device_memory", hold)
    return memory


@pytest.mark.parametrize("odd_bytes", [0, 1, 2**20, 2**21 - 1])
def test_holds_gpu_memory_beyond_the_budget(gpu, odd_bytes):
    budget_bytes = 40 * GIB - odd_bytes
    limited = CudaBudget(budget_bytes, DEVICE, OTHERS_BYTES)
    room_bytes = budget_bytes - gpu.non_pytorch_bytes - gpu.reserved_bytes
    assert 0 <= room_bytes - gpu.free_bytes < PAGE_BYTES
    assert limited.non_pytorch_bytes == GIB // 2


@pytest.mark.parametrize("budget_bytes", [None, 90 * GIB])
def test_holds_nothing_unless_memory_exceeds_the_budget(gpu, budget_bytes):
    CudaBudget(budget_bytes, DEVICE, OTHERS_BYTES)
    assert gpu.held_bytes == 0


def test_exhausted_budget_leaves_less_than_a_page(gpu):
    gpu.non_pytorch_bytes += 1
    CudaBudget(GIB, DEVICE, OTHERS_BYTES)
    assert 0 <= gpu.free_bytes < PAGE_BYTES


def test_other_programs_count_without_nvml(gpu):
    limited = CudaBudget(40 * GIB, DEVICE, None)
    assert limited.non_pytorch_bytes == GIB // 2 + OTHERS_BYTES
    assert gpu.held_bytes > 0


def test_peak_includes_growth_outside_the_allocator(gpu):
    limited = CudaBudget(40 * GIB, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = 30 * GIB
    gpu.non_pytorch_bytes = GIB
    assert limited.peak_bytes() == 31 * GIB
    # Memory that is freed again stays part of the peak.
    gpu.non_pytorch_bytes = GIB // 2
    assert limited.peak_bytes() == 31 * GIB
    assert limited.non_pytorch_bytes == GIB


def test_peak_beyond_the_budget_does_not_fit(gpu):
    limited = CudaBudget(40 * GIB, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = 39 * GIB + GIB // 2
    limited.check()
    gpu.non_pytorch_bytes += GIB // 4
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


HOLD_40_MIB = """
import sys
held = bytearray(b'x' * 40 * 2**20)
print(flush=True)
sys.stdin.read()
"""


def test_memory_of_children_counts():
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_40_MIB],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        own_bytes = psutil.Process().memory_full_info().pss
        assert footprint.memory_bytes() >= own_bytes + 40 * MIB
        assert max(footprint.private_bytes_of_children()) >= 40 * MIB
        child.stdin.close()


def test_reads_from_storage_never_fall():
    first_bytes = footprint.storage_read_bytes()
    if first_bytes is None:
        pytest.skip("this kernel does not count what processes read")
    assert footprint.storage_read_bytes() >= first_bytes >= 0


def test_figures_of_an_ended_process_are_unknown(monkeypatch):
    def raise_no_such_process(_):
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(psutil.Process, "memory_full_info", raise_no_such_process)
    monkeypatch.setattr(psutil.Process, "io_counters", raise_no_such_process)
    monkeypatch.setattr(
        psutil.Process, "children", lambda self, recursive=False: [self]
    )
    assert footprint.memory_bytes() is None
    assert footprint.private_bytes_of_children() == []
    assert footprint.storage_read_bytes() is None


GROWTH_AFTER_CLEANING = """
from autotune.trials.jobs import budget
from trainer.record.process_memory import status_bytes

def growth_bytes(count, size_bytes):
    before_bytes = status_bytes("VmSize")
    kept.append([bytes(size_bytes) for _ in range(count)])
    return status_bytes("VmSize") - before_bytes

kept = [[bytes(479) for _ in range(20_000)]]
del kept[0][::2]
budget.CpuBudget(2**40, clean=True)
print(growth_bytes(31 * 64, 479), growth_bytes(31 * 64, 479), growth_bytes(1, 100_000))
"""


def test_allocators_have_equal_room_in_every_trial():
    """Find less than an arena free in Python's allocator, and nothing in the heap.

    Otherwise trials of a size differ by 1 MiB of Python's allocator, and by 128 KiB of
    the heap, depending on where they are forked.
    """
    process = subprocess.run(
        [sys.executable, "-c", GROWTH_AFTER_CLEANING],
        capture_output=True,
        text=True,
        check=True,
    )
    in_room_bytes, beyond_room_bytes, large_bytes = map(int, process.stdout.split())
    assert in_room_bytes < 2**15
    assert beyond_room_bytes >= MIB
    assert 90_000 < large_bytes < 110_000
