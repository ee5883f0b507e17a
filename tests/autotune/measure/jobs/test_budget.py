from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from autotune.measure.jobs.budget import CudaBudget

GIB = 2**30
DEVICE = torch.device("cuda", 0)
BEFORE = GIB // 4
"""What other programs hold."""


@dataclass
class Gpu:
    """What torch and NVML say of a GPU of 80 GiB."""

    outside: int = GIB // 2
    reserved: int = GIB
    peak: int = GIB
    stats: dict[str, int] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)

    def install(self, patch):
        cuda = torch.cuda
        patch.setattr(cuda, "memory_reserved", lambda device: self.reserved)
        patch.setattr(cuda, "max_memory_reserved", lambda device: self.peak)
        patch.setattr(cuda, "device_memory_used", lambda device: BEFORE + self.outside + self.reserved)
        free = 80 * GIB - BEFORE - self.outside - self.reserved
        patch.setattr(cuda, "mem_get_info", lambda device: (free, 80 * GIB))
        patch.setattr(cuda, "memory_stats", lambda device: self.stats)
        patch.setattr(cuda, "reset_peak_memory_stats", lambda device: None)
        patch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
        patch.setattr(cuda, "set_per_process_memory_fraction", lambda share, device: self.shares.append(share))
        return self


@pytest.fixture
def gpu(monkeypatch):
    return Gpu().install(monkeypatch)


def test_the_allocator_may_have_the_budget_less_what_lies_outside_it(gpu):
    CudaBudget(40 * GIB, DEVICE, BEFORE)
    assert gpu.shares == [39.5 / 80]


def test_without_nvml_other_programs_count_too(gpu):
    assert CudaBudget(None, DEVICE, None).outside_allocator_bytes == GIB // 2 + BEFORE
    assert gpu.shares == []


def test_what_grew_outside_while_steps_ran_is_part_of_the_peak_and_never_taken_back(gpu):
    budget = CudaBudget(40 * GIB, DEVICE, BEFORE)
    gpu.peak, gpu.outside = 30 * GIB, GIB
    assert budget.peak_bytes() == 31 * GIB
    gpu.outside = GIB // 2
    assert (budget.peak_bytes(), budget.outside_allocator_bytes) == (31 * GIB, GIB)


def test_what_fits_the_budget_only_by_its_first_reading_does_not_fit(gpu):
    budget = CudaBudget(40 * GIB, DEVICE, BEFORE)
    gpu.peak = 39 * GIB + GIB // 2
    budget.check()
    gpu.outside += GIB // 4
    with pytest.raises(torch.OutOfMemoryError, match="256 MiB more than the budget"):
        budget.check()


def test_a_second_try_of_the_allocators_is_a_refusal(gpu):
    budget = CudaBudget(None, DEVICE, BEFORE)
    budget.check()
    gpu.stats["num_alloc_retries"] = 1
    with pytest.raises(torch.OutOfMemoryError, match="retry"):
        budget.check()
