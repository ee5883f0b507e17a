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


NVL = find_card("h100-nvl-94gb")
FREE_BYTES = H200.total_bytes - 500 * MIB


@pytest.mark.parametrize(
    ("asked_bytes", "as_card", "expected"),
    [
        (None, None, FREE_BYTES - RESERVE_BYTES),  # a reserve is left free unless the budget is given
        (FREE_BYTES, None, FREE_BYTES),
        (None, NVL, NVL.usable_bytes - RESERVE_BYTES),
        (80 * 10**9, NVL, 80 * 10**9),
        (94 * 10**9, NVL, 94 * 10**9),  # what is sold as 94 GB is asked for as that
        (int(93.5 * GIB), NVL, NVL.usable_bytes),  # all that a card has may be asked for
    ],
)
def test_a_budget_is_what_is_asked_for_or_free_of_the_gpu_or_the_card_that_is_imitated(asked_bytes, as_card, expected):
    assert memory_budget(site((H200,)), asked_bytes, as_card) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA H200", find_card("h200").usable_bytes), ("NVIDIA X1", H200.total_bytes)]
)
def test_if_used_memory_cannot_be_read_the_default_is_what_a_process_sees_of_the_gpu(name, expected):
    silent = replace(site((replace(H200, name=name),)), used_bytes_by_gpu=(None,))
    assert memory_budget(silent, None) == expected - RESERVE_BYTES


@pytest.mark.parametrize(
    ("gpus", "asked_bytes", "said", "next_step"),
    [
        ((replace(H200, total_bytes=40_960 * MIB),), None, "more than", "Ask for at most 40GiB."),
        ((), None, "this is a CPU", "autotune estimate"),
        ((H200,), 120 * 10**9, r"112 GiB\) is more than NVIDIA H100 NVL has: 93\.6 GiB", "Ask for at most 93.5GiB"),
    ],
)
def test_a_card_cannot_be_imitated_on_a_smaller_one_nor_without_any_nor_beyond_itself(
    gpus, asked_bytes, said, next_step
):
    with pytest.raises(BadInput, match=said) as refused:
        memory_budget(site(gpus), asked_bytes, NVL)
    assert next_step in refused.value.next_step


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


def opened(tmp_path, choice="auto", *, gpus=(H200,), visible=None, torch_gpus=(), monkeypatch, **monitor):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake = FakeGpuMonitor([FakeGpu(facts=gpu, used_bytes=[500 * MIB]) for gpu in gpus], **monitor)
    return open_site(choice, tmp_path, FakeHost(), fake, torch_gpus=lambda: torch_gpus)


@pytest.mark.parametrize(
    ("without_gpu", "next_step"),
    [("Replay it.", "Replay it."),
     (None, "Use --device cpu, or run this where there is one: autotune doctor")],
)  # fmt: skip
def test_without_the_gpu_that_is_asked_for_the_next_step_is_the_callers(tmp_path, without_gpu, next_step):
    monitor = FakeGpuMonitor(absent="no driver")
    with pytest.raises(MachineLacks, match="no GPU here: no driver") as refused:
        open_site("cuda", tmp_path, FakeHost(), monitor, without_gpu=without_gpu)
    assert refused.value.next_step == next_step


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
    one = opened(tmp_path, "cuda", monkeypatch=monkeypatch)
    assert (one.device, one.gpu, one.used_bytes_by_gpu) == ("cuda", H200, (500 * MIB,))
    assert one.words == "NVIDIA H200, 140 GiB"
    two = opened(tmp_path, gpus=(H200, replace(H200, uuid="GPU-2", index=1)), monkeypatch=monkeypatch)
    assert two.words == "NVIDIA H200, 140 GiB, the first of 2 GPUs"
