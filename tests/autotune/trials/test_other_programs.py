"""GPUs that other programs use are rejected, with an idle one if there is any."""

from dataclasses import replace

import pytest

from autotune.errors import MachineLacks
from autotune.machine.values import GpuProcess
from autotune.trials.other_programs import require_idle_gpus
from testbed.fakes import FakeGpu, FakeGpuMonitor
from tests.autotune.machine.test_measured_device import H200

PROCESS = GpuProcess(pid=42, used_bytes=2**30)


def gpu(uuid: str, index: int, *processes: GpuProcess) -> FakeGpu:
    return FakeGpu(
        facts=replace(H200, uuid=uuid, index=index),
        used_bytes=[0],
        processes=[processes],
    )


def test_rejects_the_only_gpu_if_it_is_busy():
    monitor = FakeGpuMonitor([gpu("a", 0, PROCESS)])
    with pytest.raises(MachineLacks, match="42") as rejection:
        require_idle_gpus(monitor, ["a"])
    assert rejection.value.next_step == "Wait until the GPU is free."


def test_busy_gpu_names_an_idle_one():
    monitor = FakeGpuMonitor([gpu("a", 0, PROCESS), gpu("b", 1, PROCESS), gpu("c", 2)])
    with pytest.raises(MachineLacks) as rejection:
        require_idle_gpus(monitor, ["a"])
    assert rejection.value.next_step.endswith("CUDA_VISIBLE_DEVICES=2.")


def test_accepts_an_idle_gpu_beside_a_busy_one():
    monitor = FakeGpuMonitor([gpu("a", 0, PROCESS), gpu("c", 2)])
    require_idle_gpus(monitor, ["c"])
