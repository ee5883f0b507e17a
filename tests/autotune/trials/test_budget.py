"""Memory budgets on a GPU, which is scripted, to within a page of its memory."""

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
OTHERS_BYTES = 256 * MIB
"""Memory of other programs."""
NON_PYTORCH_BYTES = 512 * MIB
"""Non-PyTorch memory of this process when the budget begins."""
RESERVED_BYTES = GIB
"""Memory that PyTorch's allocator has reserved when the budget begins."""


@dataclass(slots=True, kw_only=True)
class GpuMemory:
    """Memory of a scripted GPU, which a test changes as a step would."""

    non_pytorch_bytes: int = NON_PYTORCH_BYTES
    reserved_bytes: int = RESERVED_BYTES
    peak_reserved_bytes: int = RESERVED_BYTES
    held_bytes: int = 0
    """Memory that the budget holds, so that the process cannot use it."""
    allocator_counts: dict[str, int] = field(default_factory=dict)

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
def gpu(monkeypatch) -> GpuMemory:
    """Return the memory of the scripted GPU that ``CudaBudget`` sees."""
    memory = GpuMemory()
    fakes = {
        "memory_reserved": lambda device: memory.reserved_bytes,
        "max_memory_reserved": lambda device: memory.peak_reserved_bytes,
        "device_memory_used": lambda device: memory.used_bytes,
        "memory_stats": lambda device: memory.allocator_counts,
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
    cuda_budget = CudaBudget(budget_bytes, DEVICE, OTHERS_BYTES)
    allowed_bytes = budget_bytes - NON_PYTORCH_BYTES - RESERVED_BYTES
    assert allowed_bytes - PAGE_BYTES < gpu.free_bytes <= allowed_bytes
    assert cuda_budget.non_pytorch_bytes == NON_PYTORCH_BYTES


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
    # One byte more makes the free memory no whole number of pages.
    gpu.non_pytorch_bytes += 1
    CudaBudget(RESERVED_BYTES, DEVICE, OTHERS_BYTES)
    assert 0 <= gpu.free_bytes < PAGE_BYTES


def test_other_programs_count_without_nvml(gpu):
    cuda_budget = CudaBudget(BUDGET_BYTES, DEVICE, None)
    assert cuda_budget.non_pytorch_bytes == NON_PYTORCH_BYTES + OTHERS_BYTES
    assert gpu.held_bytes > 0


def test_peak_includes_growth_outside_the_allocator(gpu):
    cuda_budget = CudaBudget(BUDGET_BYTES, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = 30 * GIB
    gpu.non_pytorch_bytes = GIB
    assert cuda_budget.peak_bytes() == 30 * GIB + GIB


def test_freed_memory_stays_part_of_the_peak(gpu):
    cuda_budget = CudaBudget(BUDGET_BYTES, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = 30 * GIB
    gpu.non_pytorch_bytes = GIB
    assert cuda_budget.non_pytorch_bytes == GIB
    gpu.non_pytorch_bytes = NON_PYTORCH_BYTES  # freed again
    assert cuda_budget.non_pytorch_bytes == GIB
    assert cuda_budget.peak_bytes() == 30 * GIB + GIB


def test_peak_beyond_the_budget_does_not_fit(gpu):
    cuda_budget = CudaBudget(BUDGET_BYTES, DEVICE, OTHERS_BYTES)
    gpu.peak_reserved_bytes = BUDGET_BYTES - NON_PYTORCH_BYTES
    cuda_budget.check()  # the peak fills the budget
    gpu.non_pytorch_bytes += 256 * MIB
    with pytest.raises(
        torch.OutOfMemoryError,
        match=(
            r"exceeds the budget by 256 MiB: 39\.5 GiB in PyTorch's allocator"
            r" and 768 MiB of non-PyTorch memory"
        ),
    ):
        cuda_budget.check()


def test_step_that_needs_a_retry_does_not_fit(gpu):
    cuda_budget = CudaBudget(None, DEVICE, OTHERS_BYTES)
    cuda_budget.check()
    gpu.allocator_counts["num_alloc_retries"] = 1
    with pytest.raises(torch.OutOfMemoryError, match="retry"):
        cuda_budget.check()
