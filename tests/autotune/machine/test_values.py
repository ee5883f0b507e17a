from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.machine import values
from testbed.fakes import HOST
from trainer.formats.gpus import THROTTLE_REASONS

NO_SLURM = values.SlurmFacts(
    job_id=None,
    end_time_s=None,
    nodes=None,
    tasks=None,
    gpus_per_node=None,
    commands=(),
)
CPUS = st.integers(min_value=1, max_value=512)


@given(
    CPUS, CPUS, st.none() | st.floats(min_value=0.01, max_value=600), st.none() | CPUS
)
def test_allotted_cpus_stay_within_limits(online, affinity, quota, slurm):
    host = replace(
        HOST,
        cpus_online=online,
        cpus_affinity=affinity,
        cpus_quota=quota,
        cpus_slurm=slurm,
    )
    assert (
        1
        <= host.allotted_cpus
        <= max(1, min(online, affinity, quota or online, slurm or online))
    )


@given(st.sets(st.sampled_from(sorted(THROTTLE_REASONS.values()))))
def test_heat_and_slowdown_are_faults(names):
    faults = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
    assert set(values.throttle_faults(sorted(names))) == names & faults
    assert values.throttle_faults(None) == ()


NETWORK = (
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.sshfs",
    "wekafs",
    "fuse.juicefs",
)
LOCAL = ("ext4", "xfs", "tmpfs", "overlay", "fuse.mergerfs", None, "")


@pytest.mark.parametrize("kind", [*NETWORK, *LOCAL])
def test_recognises_network_file_systems(kind):
    assert values.is_network_filesystem(kind) == (kind in NETWORK)


def test_time_left_counts_down_to_zero():
    slurm = replace(NO_SLURM, job_id="7", end_time_s=1000.0, commands=("sbatch",))
    assert [
        slurm.seconds_left(datetime.fromtimestamp(now_s, UTC)) for now_s in (400, 5000)
    ] == [600, 0]
    assert NO_SLURM.seconds_left(datetime.fromtimestamp(0, UTC)) is None


def test_salloc_shell_is_on_login_node():
    slurm = replace(NO_SLURM, job_id="7", end_time_s=1000.0, commands=("sbatch",))
    assert slurm.is_login_node


@pytest.mark.parametrize(
    ("driver", "takes_time"),
    [(None, True), ("580.95.05", True), ("0.0 (nullgpu)", False)],
)
def test_only_pretended_gpus_take_no_time(driver, takes_time):
    gpu = values.MeasuredGpu(name="NVIDIA H200", driver=driver)
    assert gpu.takes_time is takes_time
