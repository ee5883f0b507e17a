"""GPUs that other programs use are rejected, with an idle one if there is any."""

from dataclasses import replace

import pytest

from autotune.errors import MachineLacks
from autotune.trials.other_programs import require_idle_gpus
from testbed.fakes import GPU_FACTS, FakeGpu, FakeGpuMonitor
from trainer.formats.gpus import GpuProcess

OTHER_PROGRAM = GpuProcess(pid=42, used_bytes=2**30)


def busy_gpu(index: int) -> FakeGpu:
    return FakeGpu(
        facts=replace(GPU_FACTS, uuid=f"GPU-{index}", index=index),
        used_bytes=[0],
        processes=[(OTHER_PROGRAM,)],
    )


def idle_gpu(index: int) -> FakeGpu:
    return replace(busy_gpu(index), processes=[()])


def test_rejects_the_only_gpu_if_it_is_busy():
    monitor = FakeGpuMonitor([busy_gpu(0)])
    with pytest.raises(MachineLacks, match="42") as rejected:
        require_idle_gpus(monitor, ["GPU-0"])
    assert rejected.value.next_step == "Wait until the GPU is free."


def test_rejection_names_an_idle_gpu():
    monitor = FakeGpuMonitor([busy_gpu(0), busy_gpu(1), idle_gpu(2)])
    with pytest.raises(MachineLacks) as rejected:
        require_idle_gpus(monitor, ["GPU-0"])
    assert rejected.value.next_step.endswith("CUDA_VISIBLE_DEVICES=2.")


def test_accepts_an_idle_gpu_beside_a_busy_one():
    monitor = FakeGpuMonitor([busy_gpu(0), idle_gpu(2)])
    require_idle_gpus(monitor, ["GPU-2"])
