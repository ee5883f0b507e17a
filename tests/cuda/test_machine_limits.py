"""Errors and figures of a GPU near its limits, and of one that is not what it seems."""

import pytest

from tests.conftest import write_dataset
from tests.nullgpu.machine import CUBLAS_NOT_INITIALIZED, Faults

pytestmark = pytest.mark.cuda
GIB = 2**30

NO_HANDLE = """
import torch
from trainer.failure import out_of_memory
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(int(free * {share}), dtype=torch.uint8, device="cuda")
x = torch.ones(64, 64, device="cuda")
try:
    x @ x
except RuntimeError as error:
    print("NOT_INITIALIZED" in str(error), out_of_memory(error) is not None)
"""


@pytest.mark.parametrize(("share", "expected"), [(0.1, "True False\n"), (0.999, "True True\n")], ids=["empty", "full"])
def test_a_handle_that_cannot_be_made_is_out_of_memory_only_on_a_full_gpu(null_gpu, share, expected):
    machine = null_gpu(memory=20 * GIB, faults=Faults(faults=f"cublasCreate_v2={CUBLAS_NOT_INITIALIZED}"))
    ended = machine.run("-c", NO_HANDLE.format(share=share))
    assert ended.out == expected, ended


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    samples = [[5 + (start + step) % 60 for step in range(8 + start % 33)] for start in range(400)]
    return write_dataset(tmp_path_factory.mktemp("patterned") / "data", samples, vocab_size=128)


def test_a_slice_is_rejected_although_the_driver_does_not_say_that_mig_is_on(null_gpu, data, tmp_path):
    machine = null_gpu(faults=Faults(mig="1g.12gb", absent=("nvmlDeviceGetMigMode",)))
    ended = machine.autotune(
        "probe", "--model", "bert-mini", "--data", data, "--seq-length", "64", "--max-rows", "8",
        "--reports", tmp_path / "reports", "--out", tmp_path / "profile.toml",
    )  # fmt: skip
    assert ended.code == 5, ended
    assert "error: CUDA computes on NVIDIA H100 NVL MIG 1g.12gb, a slice of a GPU" in ended.err, ended
    assert "-mig 0" in ended.err


MUTE = """
import os, time
from pathlib import Path
from autotune.errors import MachineLacks
from autotune.measure.host import SystemHost
from autotune.measure.nvml import NvmlMonitor
from autotune.search.site import open_site
began_s = time.monotonic()
monitor = NvmlMonitor(answer_within_s=0.5)
sample = monitor.sample(monitor.devices()[0].uuid) if monitor.devices() else None
print(len(monitor.devices()), monitor.why_absent(), sample, time.monotonic() - began_s < 2, sep="|")
try:
    open_site("auto", Path(), SystemHost(), monitor)
except MachineLacks as error:
    print(error.exit_code, error.message, error.next_step, sep="|")
monitor.close()
"""


def test_a_driver_that_never_answers_about_a_gpu_ends_a_command_with_5(null_gpu):
    ended = null_gpu(faults=Faults(faults="nvmlDeviceGetMemoryInfo=hang")).run("-c", MUTE, timeout_s=60)
    first, second = ended.out.splitlines()
    assert first.startswith("0|GPU 0: NVML does not answer: a call has not returned for 0.5 s|None|True"), ended
    assert second.startswith("5|PyTorch sees NVIDIA H100 NVL, and NVML does not describe it: GPU 0: NVML does not")
    assert "Mend NVML" in second


@pytest.mark.parametrize("function", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses_v3"])
def test_a_figure_that_never_comes_keeps_no_other_waiting(null_gpu, function):
    ended = null_gpu(faults=Faults(faults=f"{function}=hang")).run("-c", MUTE, timeout_s=60)
    assert ended.code == 0, ended
    assert "does not answer" in ended.out
    assert ended.out.startswith("1|None|GpuSample(")
    assert ended.out.splitlines()[0].endswith("|True")
