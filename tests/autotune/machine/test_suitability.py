from dataclasses import replace
from datetime import UTC, datetime

import pytest

from autotune.cluster.slurm_facts import SlurmFacts
from autotune.machine.decide import SEVERITIES, find_unsuitable
from autotune.machine.values import DiskFacts, GpuStatus, MachineFacts
from testbed import fakes
from trainer.formats.gpus import GpuProcess, Unavailable

GIB = 2**30
CAP = "sw_power_cap"
SHARED = DiskFacts(
    path="/d", filesystem_type="lustre", free_bytes=None, is_network=True
)
HOST = replace(
    fakes.HOST,
    cpus_slurm=4,
    shm_free_bytes=8 * GIB,
    load_average_1min=0.5,
    disks=(replace(SHARED, filesystem_type="ext4", is_network=False),),
)
GPU_FACTS = replace(fakes.GPU_FACTS, index=3)
SAMPLE = replace(fakes.SAMPLE, used_bytes=GIB // 2, throttle_reasons=("gpu_idle",))
GPU = GpuStatus(facts=GPU_FACTS, sample=SAMPLE, processes=())
QUIET = MachineFacts(
    time_utc=datetime(2025, 1, 1, tzinfo=UTC),
    host=HOST,
    gpus=(GPU,),
    gpu_absent=None,
    gpu_unreadable=(),
    slurm=SlurmFacts(
        job_id="1",
        end_time_s=None,
        nodes=1,
        tasks=1,
        gpus_per_node=1,
        commands=("sbatch",),
        node_name="n1",
    ),
    versions={"torch": "2.10", "transformers": "5.0"},
)


def with_gpu(**changes):
    return replace(QUIET, gpus=(replace(GPU, **changes),))


def with_host(**changes):
    return replace(QUIET, host=replace(HOST, **changes))


UNREAD = with_gpu(
    sample=Unavailable(reason="no permission"),
    processes=Unavailable(reason="no permission"),
)
CAPPED = with_gpu(sample=replace(SAMPLE, throttle_reasons=(CAP,)))


@pytest.mark.parametrize(
    "machine",
    [
        QUIET,
        UNREAD,
        CAPPED,
        with_host(load_average_1min=None, shm_free_bytes=None),
    ],
    ids=["quiet", "GPU unread", "capped", "host unread"],
)
def test_quiet_machine_has_no_findings(machine):
    assert find_unsuitable(machine) == ()


@pytest.mark.parametrize(
    ("machine", "severity", "words"),
    [
        (
            with_host(load_average_1min=2.1),
            "warning",
            "load average is 2.10 with 4 available CPU cores",
        ),
        (with_host(shm_free_bytes=GIB - 1), "warning", "/dev/shm"),
        (
            with_host(disks=(SHARED,)),
            "warning",
            "/d is on a network file system (lustre)",
        ),
        (
            with_gpu(processes=(GpuProcess(pid=42, used_bytes=GIB),)),
            "error",
            "GPU 3: pid 42 (1 GiB)",
        ),
        (
            with_gpu(processes=(GpuProcess(pid=42, used_bytes=None),)),
            "error",
            "pid 42 (n/a)",
        ),
        (
            with_gpu(sample=replace(SAMPLE, used_bytes=9 * GIB)),
            "warning",
            "9 GiB of GPU 3 are in use",
        ),
        (
            with_gpu(sample=replace(SAMPLE, throttle_reasons=(CAP, "hw_thermal"))),
            "error",
            "throttled: hw_thermal.",
        ),
        (
            with_gpu(facts=replace(GPU_FACTS, mig_enabled=True)),
            "error",
            "MIG is on for GPU 3",
        ),
        (
            with_gpu(facts=replace(GPU_FACTS, compute_mode="prohibited")),
            "error",
            "prohibited",
        ),
        (
            replace(QUIET, gpus=(), gpu_absent="no driver"),
            "info",
            "No GPU found: no driver",
        ),
        (replace(QUIET, gpu_unreadable=("GPU 1: lost",)), "warning", "GPU 1: lost"),
        (
            replace(QUIET, gpus=(), gpu_unreadable=("NVIDIA H200: no NVML",)),
            "error",
            "NVIDIA H200: no NVML",
        ),
        (
            replace(QUIET, slurm=replace(QUIET.slurm, job_id=None, node_name=None)),
            "warning",
            "login node",
        ),
        (
            replace(QUIET, versions={"transformers": "5.0"}),
            "error",
            "torch is not installed",
        ),
        (
            replace(QUIET, versions={"torch": "2.10"}),
            "error",
            "transformers is not installed",
        ),
    ],
    ids=[
        "load",
        "shared memory",
        "network disk",
        "other process",
        "other process of unknown size",
        "memory in use",
        "throttling",
        "MIG",
        "compute mode",
        "no driver",
        "unreadable GPU",
        "GPU without NVML",
        "login node",
        "no torch",
        "no transformers",
    ],
)
def test_every_spoiler_has_next_step(machine, severity, words):
    (finding,) = find_unsuitable(machine)
    assert finding.severity == severity
    assert words in finding.claim
    assert finding.next_step


def test_worst_findings_come_first():
    machine = replace(
        with_host(load_average_1min=100.0),
        gpus=(),
        gpu_absent="no driver",
        versions={"torch": "2.10"},
    )
    assert [finding.severity for finding in find_unsuitable(machine)] == list(
        SEVERITIES
    )
