from dataclasses import replace

import pytest

from autotune.errors import BadInput, MachineLacks
from autotune.machine import measured_device
from autotune.machine.gpu_models import RESERVE_BYTES, find_gpu_model
from autotune.machine.measured_device import (
    MeasuredDevice,
    local_ranks,
    look_at_node,
    memory_budget,
    open_device,
)
from testbed.examples.feeds import ON_CPU
from testbed.examples.gpu_facts import H200
from testbed.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from trainer.formats.code_hash import code_sha256
from trainer.formats.gpus import GpuFacts
from trainer.formats.manifest import read_manifest

MIB = 2**20
GIB = 2**30


def site(gpus: tuple[GpuFacts, ...]) -> MeasuredDevice:
    return (
        replace(
            ON_CPU, device="cuda", gpus=gpus, used_bytes_by_gpu=(500 * MIB,) * len(gpus)
        )
        if gpus
        else ON_CPU
    )


NVL = find_gpu_model("h100-nvl-94gb")
FREE_BYTES = H200.total_bytes - 500 * MIB
READ = site((H200,))
SILENT = replace(READ, used_bytes_by_gpu=(None,))


@pytest.mark.parametrize(
    ("device", "requested_bytes", "as_gpu", "expected"),
    [
        # A reserve is left free unless the budget is given.
        (READ, None, None, FREE_BYTES - RESERVE_BYTES),
        (READ, FREE_BYTES, None, FREE_BYTES),
        (READ, None, NVL, NVL.usable_bytes - RESERVE_BYTES),
        (READ, 80 * 10**9, NVL, 80 * 10**9),
        (
            READ,
            94 * 10**9,
            NVL,
            94 * 10**9,
        ),  # what is sold as 94 GB is asked for as that
        # You may request all usable memory of a GPU.
        (READ, int(93.5 * GIB), NVL, NVL.usable_bytes),
        # If used memory cannot be read, the default is what a process sees of the GPU.
        (SILENT, None, None, find_gpu_model("h200").usable_bytes - RESERVE_BYTES),
        (
            replace(SILENT, gpus=(replace(H200, name="NVIDIA X1"),)),
            None,
            None,
            H200.total_bytes - RESERVE_BYTES,
        ),
    ],
    ids=[
        "free memory",
        "requested",
        "imitated GPU",
        "requested of imitated GPU",
        "sold size of imitated GPU",
        "usable size of imitated GPU",
        "use unknown",
        "use and model unknown",
    ],
)
def test_budget_follows_request_or_free_memory(
    device, requested_bytes, as_gpu, expected
):
    assert memory_budget(device, requested_bytes, as_gpu) == expected


@pytest.mark.parametrize(
    ("gpus", "requested_bytes", "message", "next_step"),
    [
        (
            (replace(H200, total_bytes=40_960 * MIB),),
            None,
            "exceeds",
            "Use at most --memory 40GiB",
        ),
        ((), None, "no GPU was found", "autotune estimate"),
        (
            (H200,),
            120 * 10**9,
            r"112 GiB\) exceeds .* NVL: 93\.6 GiB",
            "Use at most --memory 93.5GiB",
        ),
    ],
    ids=["smaller GPU", "no GPU", "beyond its memory"],
)
def test_imitated_gpu_must_fit(gpus, requested_bytes, message, next_step):
    with pytest.raises(BadInput, match=message) as refused:
        memory_budget(site(gpus), requested_bytes, NVL)
    assert next_step in refused.value.next_step


def test_cpu_ranks_share_the_host():
    whole = memory_budget(site(()), None)
    assert memory_budget(site(()), None, ranks=4) == whole // 4
    with pytest.raises(BadInput, match="this host, shared by 4 processes"):
        memory_budget(site(()), whole, ranks=4)
    assert memory_budget(site((H200,)), 140 * 10**9, ranks=4) == 140 * 10**9


def test_uses_all_visible_gpus_by_default():
    two = site((H200, replace(H200, uuid="GPU-2", index=1)))
    assert [
        local_ranks(*arguments)
        for arguments in ((two, None), (two, 1), (site(()), None), (site(()), 2))
    ] == [2, 1, 1, 2]
    with pytest.raises(BadInput, match="only 2 GPUs are visible"):
        local_ranks(two, 3)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    def open_here(
        choice="auto",
        *,
        gpus=(H200,),
        visible=None,
        torch_gpus=(),
        unreadable=(),
        without=None,
        **monitor,
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(FakeGpuMonitor, "unreadable", lambda self: unreadable)
        fake = FakeGpuMonitor(
            [FakeGpu(facts=gpu, used_bytes=[500 * MIB]) for gpu in gpus], **monitor
        )
        monkeypatch.setattr(measured_device, "gpus_of_torch", lambda: torch_gpus)
        return open_device(choice, tmp_path, FakeHost(), fake, without_gpu=without)

    return open_here


SECOND = replace(H200, index=1)
UNREADABLE = {"gpus": (SECOND,), "unreadable": ("GPU 0: NVML: Not Supported",)}
"""PyTorch may count the other one first: its figures would be joined with this one's
counters."""
NO_GPU = {"choice": "cuda", "gpus": (), "absent": "no driver"}
ONLY_TORCH = {"gpus": (), "torch_gpus": ("NVIDIA H200",), "absent": "broken"}
ONLY_TORCH_SEES = (
    r"PyTorch sees NVIDIA H200, but NVML .*: broken",
    ("nvidia-smi", "--device cpu"),
)
SLICE = ("MIG is on", ("-mig 0",))


@pytest.mark.parametrize(
    ("machine", "message", "next_steps"),
    [
        (
            NO_GPU,
            "no GPU found: no driver",
            ("Use --device cpu, or run on a machine with a GPU",),
        ),
        (
            NO_GPU | {"without": "Replay it."},
            "no GPU found: no driver",
            ("Replay it.",),
        ),
        (ONLY_TORCH, *ONLY_TORCH_SEES),  # never replaced by the CPU
        (ONLY_TORCH | {"choice": "cuda"}, *ONLY_TORCH_SEES),
        ({"visible": "GPU-9"}, "CUDA_VISIBLE_DEVICES=GPU-9 matches no GPU", ("GPU-1",)),
        (UNREADABLE, "GPU 0: NVML: Not Supported", ("CUDA_VISIBLE_DEVICES=1",)),
        ({"gpus": (replace(H200, mig_enabled=True),)}, *SLICE),
        (
            {
                "gpus": (replace(H200, mig_enabled=True, mig_uuids=("MIG-7",)),),
                "visible": "MIG-7",
            },
            *SLICE,
        ),
        (
            {"gpus": (replace(H200, mig_enabled=None),), "visible": "MIG-GPU-1/3/0"},
            *SLICE,
        ),
        ({"visible": "MIG-7"}, *SLICE),
    ],
    ids=[
        "no GPU",
        "no GPU to replay",
        "only torch sees one",
        "only torch sees the chosen one",
        "not visible",
        "unreadable",
        "MIG on",
        "MIG slice chosen",
        "MIG unknown",
        "MIG slice named",
    ],
)
def test_unmeasurable_gpu_is_rejected(opened, machine, message, next_steps):
    with pytest.raises(MachineLacks, match=message) as refused:
        opened(**machine)
    assert refused.value.exit_code == 5
    assert all(words in refused.value.next_step for words in next_steps)


def test_measures_cpu_on_request(opened):
    on_purpose = opened("cpu", **ONLY_TORCH)
    assert (on_purpose.device, on_purpose.words) == ("cpu", "the CPU (broken)")


def test_measures_cpu_without_gpus(opened):
    assert opened(gpus=(), absent="no driver").words == "the CPU (no driver)"
    assert opened(visible="").words.startswith("the CPU (CUDA_VISIBLE_DEVICES=")
    assert opened("cpu").words == "the CPU"


def test_names_the_measured_gpu(opened):
    device = opened("cuda")
    assert (device.device, device.gpu, device.used_bytes_by_gpu) == (
        "cuda",
        H200,
        (500 * MIB,),
    )
    assert device.words == "NVIDIA H200, 140 GiB"
    assert (
        opened(gpus=(H200, replace(SECOND, uuid="GPU-2"))).words
        == "NVIDIA H200, 140 GiB, the first of 2 GPUs"
    )
    assert opened(**UNREADABLE, visible="1").gpu == SECOND


def looked_at(data_dir, *links: list[str] | None):
    """Return a node with a GPU for each list of links; None if NVML does not say."""
    facts = [
        replace(H200, uuid=f"GPU-{number}", index=number)
        for number in range(len(links))
    ]
    gpus = [
        FakeGpu(facts=gpu_facts, nvlinked=linked_uuids)
        for gpu_facts, linked_uuids in zip(facts, links, strict=True)
    ]
    return look_at_node("n1", data_dir, FakeHost(), FakeGpuMonitor(gpus))


@pytest.mark.parametrize(
    ("links", "linked"),
    [
        ((None,), None),  # one GPU has no peer
        ((["GPU-1", "GPU-2"], ["GPU-2"], []), True),
        ((["GPU-1"], ["GPU-2"], []), False),
        ((None, None, None), None),
        ((["GPU-1", "GPU-2"], None, None), None),
        (([], None, None), False),
    ],
    ids=[
        "one GPU",
        "all pairs",
        "a pair missing",
        "unknown",
        "one known",
        "one without links",
    ],
)
def test_node_is_linked_if_every_pair_is(monkeypatch, patterned_dataset, links, linked):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    node = looked_at(patterned_dataset, *links)
    assert (node.name, node.allotted_cpus, node.gpu_names) == (
        "n1",
        8,
        ("NVIDIA H200",) * len(links),
    )
    assert (node.nvlinked, node.code_sha256) == (linked, code_sha256())
    assert node.dataset_hash == read_manifest(patterned_dataset).dataset_hash


def test_missing_dataset_is_named(monkeypatch, patterned_dataset):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    bare = looked_at(patterned_dataset.parent)
    assert bare.dataset_hash is None
    assert "not a dataset" in bare.dataset_missing
