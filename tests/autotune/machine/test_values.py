from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.machine import values
from testbed.fakes import GPM_WINDOW, GPU_FACTS, HOST, SAMPLE

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


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_throttle_names_keep_every_bit(mask):
    bits = {name: bit for bit, name in values.THROTTLE_REASONS.items()}
    named = values.throttle_names(mask)
    assert mask == sum(
        bits.get(name) or int(name.removeprefix("unknown_"), 16) for name in named
    )
    faults = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
    assert set(values.throttle_faults(named)) == set(named) & faults
    assert values.throttle_faults(None) == ()


ONE, TWO = (
    replace(GPU_FACTS, index=index, uuid=uuid)
    for index, uuid in enumerate(("GPU-aa11", "GPU-aa22"))
)
SLICED = replace(
    GPU_FACTS,
    index=2,
    uuid="GPU-bb33",
    mig_enabled=True,
    mig_uuids=("MIG-1x", "MIG-2y"),
)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, (ONE, TWO, SLICED)),
        ("", ()),
        ("1,0", (TWO, ONE)),
        (" 1 , 2", (TWO, SLICED)),
        ("0,9,1", (ONE,)),
        ("-1", ()),
        ("0,-1,1", (ONE,)),
        ("0,0", ()),
        ("GPU-aa2,GPU-bb", (TWO, SLICED)),
        ("GPU-aa", ()),
        ("MIG-2y", (SLICED,)),
        ("MIG-1x,MIG-2y", (SLICED,)),
        ("MIG-GPU-bb33/1/0", (SLICED,)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_follow_cuda(value, seen):
    assert (
        values.visible_devices(
            [ONE, TWO, SLICED], {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        )
        == seen
    )


@given(st.text())
def test_visible_devices_are_a_subset(value):
    assert set(values.visible_devices([ONE, TWO], {"CUDA_VISIBLE_DEVICES": value})) <= {
        ONE,
        TWO,
    }


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


@given(
    st.lists(st.floats(0, 100), max_size=20).map(sorted),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_series_is_cut_between_two_moments(times_s, start_s, end_s):
    samples = tuple(replace(SAMPLE, time_s=time_s) for time_s in times_s)
    gpm = tuple(
        replace(GPM_WINDOW, start_s=time_s, end_s=time_s + 1) for time_s in times_s
    )
    cut = values.GpuSeries(
        samples=samples, gpm=gpm, lacking="a", gpm_lacking="b"
    ).between(start_s, end_s)
    assert [sample.time_s for sample in cut.samples] == [
        time_s for time_s in times_s if start_s <= time_s <= end_s
    ]
    inside = [time_s for time_s in times_s if start_s <= time_s and time_s + 1 <= end_s]
    assert [window.start_s for window in cut.gpm] == inside
    assert (cut.lacking, cut.gpm_lacking) == ("a", "b")
