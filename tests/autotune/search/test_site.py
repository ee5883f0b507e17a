from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.cards import RESERVE_BYTES, find_card
from autotune.core.hardware import GpuFacts, SlurmFacts
from autotune.errors import BadInput, MachineLacks
from autotune.measure.host import FakeHost
from autotune.measure.nvml import FakeGpu, FakeGpuMonitor
from autotune.search.site import Site, local_ranks, memory_budget, open_site

MIB = 2**20
H200 = GpuFacts(
    uuid="GPU-1", index=0, name="NVIDIA H200", total_bytes=143_771 * MIB, mig_enabled=False, power_cap_w=700.0,
    compute_mode="default", driver="580.1", compute_capability=(9, 0),
)  # fmt: skip


def site(gpus: tuple[GpuFacts, ...]) -> Site:
    return Site(
        device="cuda" if gpus else "cpu",
        gpus=gpus,
        host=FakeHost().facts([Path()]),
        slurm=SlurmFacts(job_id=None, end_time_s=None, nodes=None, tasks=None, gpus_per_node=None, commands=()),
        versions={},
        gpu_absent=None if gpus else "none",
        device_used_bytes=500 * MIB if gpus else None,
    )


def test_a_larger_card_takes_the_memory_that_a_process_sees_of_a_smaller_one():
    nvl = find_card("h100-nvl-94gb")
    assert memory_budget(site((H200,)), None, nvl) == nvl.cuda_total_bytes - RESERVE_BYTES
    assert memory_budget(site((H200,)), 80 * 10**9, nvl) == 80 * 10**9
    assert memory_budget(site((H200,)), 94 * 10**9, nvl) == 94 * 10**9  # what is sold as 94 GB is asked for as that


def test_a_reserve_is_left_free_unless_the_budget_is_given():
    free_bytes = H200.total_bytes - 500 * MIB
    assert memory_budget(site((H200,)), None) == free_bytes - 512 * MIB
    assert memory_budget(site((H200,)), free_bytes) == free_bytes


def test_a_card_cannot_be_imitated_on_a_smaller_one_nor_without_any():
    small = replace(H200, total_bytes=40_960 * MIB)
    with pytest.raises(BadInput, match="more than"):
        memory_budget(site((small,)), None, find_card("h100-nvl-94gb"))
    with pytest.raises(BadInput, match="this is a CPU") as refused:
        memory_budget(site(()), None, find_card("h100-nvl-94gb"))
    assert "autotune estimate" in refused.value.next_step


def test_more_than_the_named_card_has_is_refused():
    with pytest.raises(BadInput, match="more than NVIDIA H100 NVL has"):
        memory_budget(site((H200,)), 120 * 10**9, find_card("h100-nvl-94gb"))


def test_ranks_of_a_cpu_share_the_host_and_those_of_gpus_do_not():
    whole = memory_budget(site(()), None)
    assert memory_budget(site(()), None, ranks=4) == whole // 4
    with pytest.raises(BadInput, match="more than each of 4 ranks may take of this host"):
        memory_budget(site(()), whole, ranks=4)
    assert memory_budget(site((H200,)), 140 * 10**9, ranks=4) == 140 * 10**9


def test_all_visible_gpus_step_together_unless_fewer_are_asked_for():
    two = site((H200, replace(H200, uuid="GPU-2", index=1)))
    assert local_ranks(two, None) == 2
    assert local_ranks(two, 1) == 1
    assert local_ranks(site(()), None) == 1
    assert local_ranks(site(()), 2) == 2
    with pytest.raises(BadInput, match="there are 2 GPUs"):
        local_ranks(two, 3)


def test_without_the_gpu_that_is_asked_for_the_next_step_is_the_callers(tmp_path):
    monitor = FakeGpuMonitor(absent="no driver")
    with pytest.raises(MachineLacks, match="no GPU here: no driver") as refused:
        open_site("cuda", tmp_path, FakeHost(), monitor, without_gpu="Replay it.")
    assert refused.value.next_step == "Replay it."
    with pytest.raises(MachineLacks) as refused:
        open_site("cuda", tmp_path, FakeHost(), monitor)
    assert "--device cpu" in refused.value.next_step


def test_with_the_gpu_there_is_nothing_to_do_instead(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monitor = FakeGpuMonitor([FakeGpu(facts=H200, used_bytes=[500 * MIB])])
    opened = open_site("cuda", tmp_path, FakeHost(), monitor, without_gpu="Replay it.")
    assert (opened.device, opened.gpu, opened.used_bytes_by_gpu) == ("cuda", H200, (500 * MIB,))
