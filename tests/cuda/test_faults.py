"""Probes on a GPU that is shared, sliced, hot or short of memory.

Or whose driver does not report everything.
"""

import tomllib

import pytest

from autotune.trials.trial_log import read_trial_records
from testbed.nullgpu.machine import (
    CUBLAS_ALLOC_FAILED,
    CUBLAS_NOT_INITIALIZED,
    NVML_DRIVER_NOT_LOADED,
    NVML_NOT_SUPPORTED,
    Faults,
)

pytestmark = pytest.mark.cuda
GIB = 2**30
OPTIONAL_FUNCTIONS = (
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetCurrentClocksEventReasons",
)
NOT_SUPPORTED = ",".join(f"{name}={NVML_NOT_SUPPORTED}" for name in OPTIONAL_FUNCTIONS)


def probe(machine, data, *options, code=0):
    """Run a probe with few trials; return its end, and the outcomes by label."""
    common = (
        "--model",
        "bert-mini",
        "--data",
        data,
        "--seq-length",
        "64",
        "--trial-timeout",
        "24s",
        "--no-compile",
    )
    files = (
        "--reports",
        machine.folder / "reports",
        "--out",
        machine.folder / "profile.toml",
    )
    ended = machine.autotune("probe", *common, *files, *options)
    assert ended.code == code, ended
    records, _ = read_trial_records(machine.folder / "reports/profile/trials")
    return ended, {record.label: record.outcome["kind"] for record in records}


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (
            Faults(neighbour=5 * GIB),
            "GPU 0 is already in use: 5.58 GiB allocated (pid 1: 5 GiB)",
        ),
        (Faults(mig="1g.12gb"), "MIG is on"),
        (
            Faults(faults=f"nvmlInitWithFlags={NVML_DRIVER_NOT_LOADED}"),
            "PyTorch sees NVIDIA H100 NVL, but NVML does not: NVML: Driver Not Loaded",
        ),
        (
            Faults(mig="1g.12gb", absent=("nvmlDeviceGetMigMode",)),
            "error: 'NVIDIA H100 NVL MIG 1g.12gb' is a MIG slice",
        ),
    ],
    ids=["neighbour", "MIG", "without NVML", "MIG that is not told"],
)
def test_rejects_gpu_in_use_or_unreadable(null_gpu, patterned_dataset, faults, message):
    ended, _ = probe(
        null_gpu(faults=faults),
        patterned_dataset,
        "--max-micro-batch-size",
        "8",
        code=5,
    )
    assert message in ended.err, ended
    assert ("-mig 0" in ended.err) == bool(faults.mig), ended
    assert ended.counts.total("kernel") == 0


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(absent=OPTIONAL_FUNCTIONS), id="absent"),
        pytest.param(
            Faults(faults=NOT_SUPPORTED), marks=pytest.mark.soak, id="not supported"
        ),
    ],
)
def test_optional_functions_of_nvml_may_be_absent(null_gpu, patterned_dataset, faults):
    doctor = null_gpu(faults=faults).autotune("doctor")
    assert doctor.code == 0, doctor
    assert "NVIDIA H100 NVL" in doctor.out, doctor
    _, outcomes = probe(
        null_gpu(faults=faults), patterned_dataset, "--max-micro-batch-size", "8"
    )
    assert outcomes == {"bert-mini: 8 sequences": "measured"}


def test_growing_non_pytorch_memory_is_out_of_memory(null_gpu, patterned_dataset):
    machine = null_gpu(faults=Faults(growth_per_launch=2**21))
    _, outcomes = probe(
        machine,
        patterned_dataset,
        "--memory",
        "4GiB",
        "--max-micro-batch-size",
        "1",
        code=4,
    )
    assert outcomes == {
        "bert-mini: 1 sequence": "out_of_memory",
        "bert-mini: 1 sequence, wider limit": "measured",
    }


def test_matmul_without_memory_bounds_the_size(null_gpu, patterned_dataset):
    faults = ",".join(
        f"{name}={CUBLAS_ALLOC_FAILED}<{300 * 10**6}"
        for name in ("cublasGemmEx", "cublasLtMatmul")
    )
    machine = null_gpu(faults=Faults(faults=faults))
    _, outcomes = probe(
        machine,
        patterned_dataset,
        "--memory",
        "1500MiB",
        "--max-micro-batch-size",
        "4096",
    )
    profile = tomllib.loads((machine.folder / "profile.toml").read_text())
    largest = profile["evidence"]["probe"]["feasible_max"]
    assert outcomes[f"bert-mini: {largest} sequences"] == "measured", outcomes
    assert outcomes[f"bert-mini: {largest + 1} sequences"] == "out_of_memory", outcomes


def test_heat_voids_only_trials_of_speed(null_gpu, patterned_dataset):
    machine = null_gpu(
        driver="580.95.05", faults=Faults(thermal_first=1, thermal_samples=10**6)
    )
    ended, outcomes = probe(
        machine, patterned_dataset, "--max-micro-batch-size", "8", code=8
    )
    message = (
        "sequences, throughput' could not be measured (contaminated):\nGPU 0 was slowed"
        " down: hw_thermal"
    )
    assert message in ended.err, ended
    assert outcomes.pop("bert-mini: 8 sequences") == "measured"
    assert set(outcomes.values()) == {"contaminated"}


FAIL_TO_MAKE_A_HANDLE = """
import torch
from trainer.runtime.out_of_memory import out_of_memory
free, _ = torch.cuda.mem_get_info()
kept = torch.empty(int(free * {share}), dtype=torch.uint8, device="cuda")
x = torch.ones(64, 64, device="cuda")
try:
    x @ x
except RuntimeError as error:
    print("NOT_INITIALIZED" in str(error), out_of_memory(error) is not None)
"""


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, "True False\n"), (0.999, "True True\n")],
    ids=["empty", "full"],
)
def test_failed_handle_is_oom_only_if_full(null_gpu, share, expected):
    machine = null_gpu(
        memory=20 * GIB,
        faults=Faults(faults=f"cublasCreate_v2={CUBLAS_NOT_INITIALIZED}"),
    )
    ended = machine.run("-c", FAIL_TO_MAKE_A_HANDLE.format(share=share))
    assert ended.out == expected, ended


ASK_SILENT_DRIVER = """
import os, time
from pathlib import Path
from autotune.errors import MachineLacks
from autotune.machine.host import SystemHost
from autotune.machine.measured_device import open_device
from trainer.formats import nvml
started_s = time.monotonic()
nvml.ANSWER_WITHIN_S = 0.5
monitor = nvml.NvmlMonitor()
devices = monitor.devices()
sample = monitor.sample(devices[0].uuid) if devices else None
is_soon = time.monotonic() - started_s < 2
print(len(devices), monitor.why_absent(), sample, is_soon, sep="|")
try:
    open_device("auto", Path(), SystemHost(), monitor)
except MachineLacks as error:
    print(error.exit_code, error.message, error.next_step, sep="|")
monitor.close()
"""


def test_silent_driver_ends_a_command_with_5(null_gpu):
    machine = null_gpu(faults=Faults(faults="nvmlDeviceGetMemoryInfo=hang"))
    ended = machine.run("-c", ASK_SILENT_DRIVER, timeout_s=60)
    answer, error = ended.out.splitlines()
    assert answer.startswith(
        "0|GPU 0: NVML does not respond: a call has not returned for 0.5 s|None|True"
    ), ended
    assert error.startswith(
        "5|PyTorch sees NVIDIA H100 NVL, but NVML does not: GPU 0: NVML does not"
    )
    assert "Fix NVML" in error


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses_v3"],
)
def test_missing_figure_does_not_delay_others(null_gpu, function):
    machine = null_gpu(faults=Faults(faults=f"{function}=hang"))
    ended = machine.run("-c", ASK_SILENT_DRIVER, timeout_s=60)
    assert ended.code == 0, ended
    assert "does not respond" in ended.out
    assert ended.out.startswith("1|None|GpuSample(")
    assert ended.out.splitlines()[0].endswith("|True")
