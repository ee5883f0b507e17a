from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.cards import RESERVE_BYTES, find_card
from autotune.core.hardware import GpuFacts, SlurmFacts
from autotune.errors import BadInput, MachineLacks
from autotune.search.site import Site, local_ranks, memory_budget, open_site
from tests.fakes import FakeGpu, FakeGpuMonitor, FakeHost

MIB, GIB = 2**20, 2**30
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
        used_bytes_by_gpu=(500 * MIB,) * len(gpus),
    )


def test_a_larger_card_takes_the_memory_that_a_process_sees_of_a_smaller_one():
    nvl = find_card("h100-nvl-94gb")
    assert memory_budget(site((H200,)), None, nvl) == nvl.usable_bytes - RESERVE_BYTES
    assert memory_budget(site((H200,)), 80 * 10**9, nvl) == 80 * 10**9
    assert memory_budget(site((H200,)), 94 * 10**9, nvl) == 94 * 10**9  # what is sold as 94 GB is asked for as that


def test_a_reserve_is_left_free_unless_the_budget_is_given():
    free_bytes = H200.total_bytes - 500 * MIB
    assert memory_budget(site((H200,)), None) == free_bytes - 512 * MIB
    assert memory_budget(site((H200,)), free_bytes) == free_bytes


def test_where_used_memory_cannot_be_read_the_default_is_what_a_process_sees_of_the_gpu():
    silent = replace(site((H200,)), used_bytes_by_gpu=(None,))
    assert memory_budget(silent, None) == find_card("h200").usable_bytes - RESERVE_BYTES
    unknown = replace(site((replace(H200, name="NVIDIA X1"),)), used_bytes_by_gpu=(None,))
    assert memory_budget(unknown, None) == H200.total_bytes - RESERVE_BYTES


def test_a_card_cannot_be_imitated_on_a_smaller_one_nor_without_any():
    small = replace(H200, total_bytes=40_960 * MIB)
    with pytest.raises(BadInput, match="more than"):
        memory_budget(site((small,)), None, find_card("h100-nvl-94gb"))
    with pytest.raises(BadInput, match="this is a CPU") as refused:
        memory_budget(site(()), None, find_card("h100-nvl-94gb"))
    assert "autotune estimate" in refused.value.next_step


def test_more_than_the_named_card_has_is_refused():
    with pytest.raises(BadInput, match=r"112 GiB\) is more than NVIDIA H100 NVL has: 93\.6 GiB") as refused:
        memory_budget(site((H200,)), 120 * 10**9, find_card("h100-nvl-94gb"))
    assert refused.value.next_step == "Ask for at most 93.5GiB, or leave --memory out."


def test_all_that_a_named_card_has_may_be_asked_for():
    nvl = find_card("h100-nvl-94gb")
    assert memory_budget(site((H200,)), 92 * GIB, nvl) == 92 * GIB
    assert memory_budget(site((H200,)), int(93.5 * GIB), nvl) == nvl.usable_bytes


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


def opened(tmp_path, choice="auto", *, gpus=(H200,), visible=None, torch_gpus=(), monkeypatch, **monitor):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake = FakeGpuMonitor([FakeGpu(facts=gpu) for gpu in gpus], **monitor)
    return open_site(choice, tmp_path, FakeHost(), fake, torch_gpus=lambda: torch_gpus)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_a_gpu_that_only_torch_sees_is_never_replaced_by_the_cpu(tmp_path, monkeypatch, choice):
    with pytest.raises(MachineLacks, match=r"PyTorch sees NVIDIA H200, and NVML .*: broken") as refused:
        opened(tmp_path, choice, gpus=(), torch_gpus=("NVIDIA H200",), absent="broken", monkeypatch=monkeypatch)
    assert refused.value.exit_code == 5
    assert "nvidia-smi" in refused.value.next_step
    assert "--device cpu" in refused.value.next_step


def test_the_cpu_is_measured_where_it_is_asked_for_or_nothing_else_is_there(tmp_path, monkeypatch):
    on_purpose = opened(tmp_path, "cpu", gpus=(), torch_gpus=("NVIDIA H200",), absent="broken", monkeypatch=monkeypatch)
    assert (on_purpose.device, on_purpose.words) == ("cpu", "the CPU (broken)")
    assert opened(tmp_path, gpus=(), absent="no driver", monkeypatch=monkeypatch).words == "the CPU (no driver)"
    assert opened(tmp_path, visible="", monkeypatch=monkeypatch).words.startswith("the CPU (CUDA_VISIBLE_DEVICES=")
    assert opened(tmp_path, "cpu", monkeypatch=monkeypatch).words == "the CPU"


def test_a_named_gpu_that_nvml_does_not_know_is_rejected(tmp_path, monkeypatch):
    with pytest.raises(MachineLacks, match="CUDA_VISIBLE_DEVICES=GPU-9 names no GPU here") as refused:
        opened(tmp_path, visible="GPU-9", monkeypatch=monkeypatch)
    assert "GPU-1" in refused.value.next_step


def test_a_gpu_beside_one_that_cannot_be_described_has_to_be_named(tmp_path, monkeypatch):
    """PyTorch may count the other one first: its figures would be joined with this one's counters."""
    monkeypatch.setattr(FakeGpuMonitor, "unreadable", lambda self: ("GPU 0: NVML: Not Supported",))
    second = replace(H200, index=1)
    with pytest.raises(MachineLacks, match="GPU 0: NVML: Not Supported") as refused:
        opened(tmp_path, gpus=(second,), monkeypatch=monkeypatch)
    assert "CUDA_VISIBLE_DEVICES=1" in refused.value.next_step
    assert opened(tmp_path, gpus=(second,), visible="1", monkeypatch=monkeypatch).gpu == second


@pytest.mark.parametrize(
    ("changes", "visible"),
    [({"mig_enabled": True}, None), ({"mig_enabled": True, "mig_uuids": ("MIG-7",)}, "MIG-7"),
     ({"mig_enabled": None}, "MIG-GPU-1/3/0"), ({}, "MIG-7")],
)  # fmt: skip
def test_a_slice_of_a_gpu_is_rejected(tmp_path, monkeypatch, changes, visible):
    with pytest.raises(MachineLacks, match="MIG is on") as refused:
        opened(tmp_path, gpus=(replace(H200, **changes),), visible=visible, monkeypatch=monkeypatch)
    assert refused.value.exit_code == 5
    assert "-mig 0" in refused.value.next_step


def test_the_gpu_that_is_measured_is_named(tmp_path, monkeypatch):
    assert opened(tmp_path, monkeypatch=monkeypatch).words == "NVIDIA H200, 140 GiB"
    two = opened(tmp_path, gpus=(H200, replace(H200, uuid="GPU-2", index=1)), monkeypatch=monkeypatch)
    assert two.words == "NVIDIA H200, 140 GiB, the first of 2 GPUs"
