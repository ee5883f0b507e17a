"""Probes on a GPU that is shared, sliced, hot or short of memory, or whose driver does not tell everything."""

import tomllib
from typing import Any

import pytest

from autotune.search.trials import records_in
from tests.nullgpu.machine import CUBLAS_ALLOC_FAILED, NVML_DRIVER_NOT_LOADED, NVML_NOT_SUPPORTED, Faults

pytestmark = pytest.mark.cuda
GIB = 2**30
OPTIONAL = (
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetCurrentClocksEventReasons",
)
NOT_TOLD = [
    Faults(absent=OPTIONAL),
    Faults(faults=",".join(f"{name}={NVML_NOT_SUPPORTED}" for name in OPTIONAL)),
]


class Probed:
    """A probe with few trials, and what each of them came to."""

    def __init__(self, machine, data, *words) -> None:
        common = ("--model", "bert-mini", "--data", data, "--seq-length", "64", "--trial-timeout", "24")
        self._profile = machine.folder / "profile.toml"
        files = ("--reports", machine.folder / "reports", "--out", self._profile)
        self.ended = machine.autotune("probe", *common, *files, *words)
        self._ledger = machine.folder / "reports/profile/ledger"

    def outcomes(self) -> dict[str, str]:
        return {record.label: record.outcome["kind"] for record in records_in(self._ledger)[0]}

    def evidence(self) -> dict[str, Any]:
        assert self.ended.code == 0, self.ended
        return tomllib.loads(self._profile.read_text())["evidence"]["probe"]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (Faults(neighbour=5 * GIB), "GPU 0 is in use already: 5.58 GiB are taken (pid 1: 5 GiB)"),
        (Faults(mig="1g.12gb"), "MIG is on"),
        (
            Faults(faults=f"nvmlInitWithFlags={NVML_DRIVER_NOT_LOADED}"),
            "PyTorch sees NVIDIA H100 NVL, and NVML does not describe it: NVML: Driver Not Loaded",
        ),
    ],
    ids=["neighbour", "MIG", "without NVML"],
)
def test_a_gpu_that_is_not_ours_alone_or_not_described_is_not_probed_nor_replaced_by_the_cpu(
    null_gpu, patterned_dataset, faults, said
):
    ended = Probed(null_gpu(faults=faults), patterned_dataset).ended
    assert ended.code == 5, ended
    assert said in ended.err, ended
    assert ended.counts.total("kernel") == 0


@pytest.mark.parametrize("faults", NOT_TOLD, ids=["absent", "not supported"])
def test_doctor_and_probe_need_no_optional_function_of_nvml(null_gpu, patterned_dataset, faults):
    told = null_gpu(faults=faults).autotune("doctor")
    assert told.code == 0, told
    assert "NVIDIA H100 NVL" in told.out, told
    probed = Probed(null_gpu(faults=faults), patterned_dataset, "--max-rows", "8")
    assert probed.ended.code == 0, probed.ended
    assert probed.outcomes() == {"bert-mini: 8 rows": "measured"}


def test_memory_outside_the_allocator_that_grows_makes_a_trial_out_of_memory(null_gpu, patterned_dataset):
    machine = null_gpu(faults=Faults(growth_per_launch=2**21))
    probed = Probed(machine, patterned_dataset, "--memory", "4GiB", "--max-rows", "1")
    assert probed.ended.code == 4, probed.ended
    assert probed.outcomes() == {
        "bert-mini: 1 rows": "out_of_memory",
        "bert-mini: 1 rows without a limit": "measured",
    }


def test_a_product_that_finds_no_memory_bounds_the_size_as_the_allocator_does(null_gpu, patterned_dataset):
    faults = ",".join(f"{name}={CUBLAS_ALLOC_FAILED}<{300 * 10**6}" for name in ("cublasGemmEx", "cublasLtMatmul"))
    machine = null_gpu(faults=Faults(faults=faults))
    probed = Probed(machine, patterned_dataset, "--memory", "1500MiB", "--max-rows", "4096")
    fits = probed.evidence()["feasible_max"]
    outcomes = probed.outcomes()
    assert outcomes[f"bert-mini: {fits} rows"] == "measured", outcomes
    assert outcomes[f"bert-mini: {fits + 1} rows"] == "out_of_memory", outcomes


def test_one_hot_sample_voids_one_trial_of_speed_at_most_and_no_probe(null_gpu, patterned_dataset):
    machine = null_gpu(driver="580.95.05", faults=Faults(thermal_first=12, thermal_samples=1))
    probed = Probed(machine, patterned_dataset, "--max-rows", "8")
    assert probed.ended.counts["call", "nvmlDeviceGetCurrentClocksEventReasons"] > 12
    assert probed.evidence()["curve"]
    contaminated = [label for label, kind in probed.outcomes().items() if kind == "contaminated"]
    assert len(contaminated) <= 1
    assert all("speed" in label for label in contaminated)
