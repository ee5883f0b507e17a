import os
import re
from pathlib import Path

import pytest

from trainer.preflight.allotted_cpus import allotted_cpus


@pytest.fixture
def machine_cpus(monkeypatch) -> int:
    """Number of CPUs of the machine, all of which the process is allowed to run on."""
    cpus = 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    return cpus


def write_cpu_quota_v2(root: Path, content: str) -> None:
    """Write the quota of this process's control group, version 2, below ``root``."""
    match = re.search(
        r"^0::/?(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE
    )
    if match is None:
        pytest.skip("no unified control groups on this machine")
    group = root / match[1]
    group.mkdir(parents=True, exist_ok=True)
    (group / "cpu.max").write_text(content)


def write_cpu_quota_v1(root: Path, quota_us: str) -> None:
    """Write a quota per 100,000 us of a control group, version 1, below ``root``."""
    group = root / "cpu"
    group.mkdir()
    (group / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("quota_us_and_period_us", "expected"),
    [
        pytest.param("800000 100000", 8, id="eight CPUs"),
        pytest.param("50000 100000", 1, id="half a CPU"),
    ],
)
def test_control_group_v2_limits_cpus(
    tmp_path, machine_cpus, quota_us_and_period_us, expected
):
    write_cpu_quota_v2(tmp_path, quota_us_and_period_us)
    assert allotted_cpus(environment={}, cgroup_root=tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("max 100000", id="unlimited"),
        pytest.param("x", id="no quota"),
        pytest.param("", id="empty file"),
    ],
)
def test_control_group_v2_without_quota_limits_nothing(tmp_path, machine_cpus, content):
    write_cpu_quota_v2(tmp_path, content)
    assert allotted_cpus(environment={}, cgroup_root=tmp_path) == machine_cpus


@pytest.mark.parametrize(
    ("quota_us", "expected"),
    [
        pytest.param("400000", 4, id="four CPUs"),
        pytest.param("1000", 1, id="a hundredth of a CPU"),
    ],
)
def test_control_group_v1_limits_cpus(tmp_path, machine_cpus, quota_us, expected):
    write_cpu_quota_v1(tmp_path, quota_us)
    assert allotted_cpus(environment={}, cgroup_root=tmp_path) == expected


@pytest.mark.parametrize(
    "quota_us",
    [pytest.param("-1", id="unlimited"), pytest.param("", id="empty file")],
)
def test_control_group_v1_without_quota_limits_nothing(
    tmp_path, machine_cpus, quota_us
):
    write_cpu_quota_v1(tmp_path, quota_us)
    assert allotted_cpus(environment={}, cgroup_root=tmp_path) == machine_cpus


def test_slurm_limits_cpus(tmp_path, machine_cpus):
    environment = {"SLURM_CPUS_PER_TASK": "12"}
    assert allotted_cpus(environment=environment, cgroup_root=tmp_path) == 12


@pytest.mark.parametrize("slurm_cpus", ["many", ""])
def test_ignores_slurm_cpus_that_are_no_number(tmp_path, machine_cpus, slurm_cpus):
    environment = {"SLURM_CPUS_PER_TASK": slurm_cpus}
    assert allotted_cpus(environment=environment, cgroup_root=tmp_path) == machine_cpus


def test_cpus_before_binding_replace_those_of_the_process(tmp_path, machine_cpus):
    unbound_cpus = 2 * machine_cpus
    assert (
        allotted_cpus(unbound_cpus, environment={}, cgroup_root=tmp_path)
        == unbound_cpus
    )


@pytest.mark.parametrize(
    ("unbound_cpus", "expected"),
    [pytest.param(2, 2, id="binding"), pytest.param(128, 12, id="SLURM")],
)
def test_allotted_cpus_are_the_least_limit(
    tmp_path, machine_cpus, unbound_cpus, expected
):
    environment = {"SLURM_CPUS_PER_TASK": "12"}
    assert (
        allotted_cpus(unbound_cpus, environment=environment, cgroup_root=tmp_path)
        == expected
    )
