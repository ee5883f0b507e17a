from dataclasses import replace

import pytest

from autotune.search.node import look_at_node
from tests.autotune.search.test_site import H200
from tests.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from trainer.dataset import read_manifest
from trainer.record import code_sha256


def gpu(number: int, linked: list[str] | None) -> FakeGpu:
    return FakeGpu(facts=replace(H200, uuid=f"GPU-{number}", index=number), nvlinked=linked)


@pytest.fixture(autouse=True)
def every_gpu_is_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_node_is_described_with_its_code_and_data(patterned_dataset):
    found = look_at_node("n1", patterned_dataset, FakeHost(), FakeGpuMonitor([gpu(0, None)]))
    assert (found.name, found.allotted_cpus, found.gpu_names) == ("n1", 8, ("NVIDIA H200",))
    assert found.code_sha256 == code_sha256()
    assert found.dataset_hash == read_manifest(patterned_dataset).dataset_hash
    assert found.nvlinked is None  # one GPU has nobody to be linked with


@pytest.mark.parametrize(
    ("links", "linked"),
    [
        ((["GPU-1", "GPU-2"], ["GPU-2"], []), True),
        ((["GPU-1"], ["GPU-2"], []), False),
        ((None, None, None), None),
        ((["GPU-1", "GPU-2"], None, None), None),
        (([], None, None), False),
    ],
)
def test_gpus_are_linked_when_every_pair_is_and_nobody_guesses(patterned_dataset, links, linked):
    monitor = FakeGpuMonitor([gpu(number, listed) for number, listed in enumerate(links)])
    assert look_at_node("n1", patterned_dataset, FakeHost(), monitor).nvlinked is linked


def test_a_missing_dataset_is_said(tmp_path):
    found = look_at_node("n1", tmp_path, FakeHost(), FakeGpuMonitor())
    assert found.dataset_hash is None
    assert "not a dataset" in found.dataset_missing
