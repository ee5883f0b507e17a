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
    held: int = 0

    def used(self):
        return BEFORE + self.outside + self.reserved + self.held


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    says = {
        "memory_reserved": lambda device: found.reserved,
        "max_memory_reserved": lambda device: found.peak,
        "device_memory_used": lambda device: found.used(),
        "memory_stats": lambda device: found.stats,
        "mem_get_info": lambda device: (80 * GIB - found.used(), 80 * GIB),
        "reset_peak_memory_stats": lambda device: None,
    }
    for name, answer in says.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(budget, "hold_device_memory", partial(setattr, found, "held"))
    return found


@pytest.mark.parametrize("odd_bytes", [0, 1, 2**20, 2**21 - 1])
def test_what_the_gpu_has_beyond_the_budget_is_held_to_the_last_byte(gpu, odd_bytes):
    limited = CudaBudget(40 * GIB - odd_bytes, DEVICE, BEFORE)
    left_bytes = 80 * GIB - gpu.used()
    assert 0 <= 40 * GIB - odd_bytes - gpu.outside - gpu.reserved - left_bytes < 2**21
    assert limited.non_pytorch_bytes == GIB // 2


def test_nothing_is_held_if_there_is_no_more_than_the_budget_and_all_but_a_page_if_it_is_used_up(
    gpu,
):
    for budget_bytes in (None, 90 * GIB):
        CudaBudget(budget_bytes, DEVICE, BEFORE)
        assert gpu.held == 0
    gpu.outside += 1
    CudaBudget(GIB, DEVICE, BEFORE)
    assert 0 <= 80 * GIB - gpu.used() < 2**21


def test_without_nvml_other_programs_count_too(gpu):
    assert CudaBudget(40 * GIB, DEVICE, None).non_pytorch_bytes == GIB // 2 + BEFORE
    assert gpu.held > 0


def test_what_grew_outside_while_steps_ran_is_part_of_the_peak_and_never_taken_back(
    gpu,
):
    limited = CudaBudget(40 * GIB, DEVICE, BEFORE)
    gpu.peak, gpu.outside = 30 * GIB, GIB
    assert limited.peak_bytes() == 31 * GIB
    gpu.outside = GIB // 2
    assert (limited.peak_bytes(), limited.non_pytorch_bytes) == (31 * GIB, GIB)


def test_what_fits_the_budget_only_by_its_first_reading_or_by_a_second_try_does_not_fit(
    gpu,
):
    limited = CudaBudget(40 * GIB, DEVICE, BEFORE)
    gpu.peak = 39 * GIB + GIB // 2
    limited.check()
    gpu.outside += GIB // 4
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"exceeds the budget by 256 MiB: 39\.5 GiB in .* and 768 MiB of",
    ):
        limited.check()
    limited = CudaBudget(None, DEVICE, BEFORE)
    limited.check()
    gpu.stats["num_alloc_retries"] = 1
    with pytest.raises(torch.OutOfMemoryError, match="retry"):
        limited.check()


HOLDS = (
    "import sys\nheld = bytearray(b'x' * 40 *"
    " 2**20)\nprint(flush=True)\nsys.stdin.read()"
)


def test_children_count_towards_the_memory_and_are_told_apart():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        alone = psutil.Process().memory_full_info().pss
        assert footprint.memory_bytes() >= alone + 40 * 2**20
        assert max(footprint.private_bytes_of_children()) >= 40 * 2**20
        child.stdin.close()


def test_reads_from_storage_never_fall():
    first = footprint.storage_read_bytes()
    if first is None:
        pytest.skip("this kernel does not count what processes read")
    assert footprint.storage_read_bytes() >= first >= 0


def test_a_process_that_ends_meanwhile_makes_figures_unknown_and_not_wrong(monkeypatch):
    def gone(_):
        raise psutil.NoSuchProcess(os.getpid())

    monkeypatch.setattr(psutil.Process, "memory_full_info", gone)
    monkeypatch.setattr(psutil.Process, "io_counters", gone)
    monkeypatch.setattr(
        psutil.Process, "children", lambda self, recursive=False: [self]
    )
    assert footprint.memory_bytes() is None
    assert footprint.private_bytes_of_children() == []
    assert footprint.storage_read_bytes() is None


FILLED = """
from autotune.trials.jobs import budget
from trainer.record.meter import status_bytes

def grown_bytes(count, size):
    before_bytes = status_bytes("VmSize")
    kept.append([bytes(size) for _ in range(count)])
    return status_bytes("VmSize") - before_bytes

kept = [[bytes(479) for _ in range(20_000)]]
del kept[0][::2]
budget.CpuBudget(2**40, clean=True)
print(grown_bytes(31 * 64, 479), grown_bytes(31 * 64, 479), grown_bytes(1, 100_000))
"""


def test_allocators_have_the_same_room_in_every_trial():
    """Otherwise those of a size differ by 1 MiB of Python's, and by 128 KiB of the
    heap's, by where they are forked."""
    ended = subprocess.run(
        [sys.executable, "-c", FILLED], capture_output=True, text=True, check=True
    )
    within, beyond, large = map(int, ended.stdout.split())
    assert within < 2**15 < 2**20 <= beyond
    assert 90_000 < large < 110_000
