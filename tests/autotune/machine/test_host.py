"""One suite for every clock and host, and Linux files that a test lays out."""

import sys
from datetime import UTC, timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.base.answer_json import jsonable
from autotune.base.clock import SystemClock
from autotune.errors import MachineLacks
from autotune.machine.host import LIBRARIES, SystemHost, _unescape
from testbed.fakes import FakeClock, FakeHost


@pytest.fixture(params=[SystemClock, FakeClock])
def clock(request):
    return request.param()


def test_clocks_never_go_back(clock):
    times = [clock.monotonic_s() for _ in range(100)]
    assert times == sorted(times)


def test_sleep_lasts_as_long_as_requested(clock):
    before = clock.utc_now()
    assert before.tzinfo is UTC
    before_s = clock.monotonic_s()
    clock.sleep(0.03125)  # exact in binary, so that no rounding shortens it
    assert clock.monotonic_s() - before_s >= 0.03125
    assert clock.utc_now() - before >= timedelta(milliseconds=15)


def test_sleep_is_not_negative(clock):
    with pytest.raises(ValueError, match="negative"):
        clock.sleep(-1)


@pytest.fixture(params=["system", "fake"])
def host(request):
    return (
        SystemHost()
        if request.param == "system"
        else FakeHost(versions={"numpy": "2.0"})
    )


def test_facts_are_possible(host, tmp_path):
    paths = [tmp_path, Path(), tmp_path / "not" / "there"]
    facts = host.facts(paths)
    assert [disk.path for disk in facts.disks] == [str(path) for path in paths]
    assert 1 <= facts.allotted_cpus <= facts.cpus_online
    assert 0 <= facts.ram_available_bytes <= facts.ram_total_bytes
    assert facts.ram_limit_source
    content = jsonable(facts)
    assert (content["cpus_online"], content["disks"][1]["path"]) == (
        facts.cpus_online,
        ".",
    )


def test_finds_versions_without_importing(host, monkeypatch):
    for name in ("torch", "transformers", "optuna"):
        monkeypatch.setitem(sys.modules, name, None)
    assert {"numpy"} <= set(host.library_versions()) <= set(LIBRARIES)
    assert "torch" in SystemHost().library_versions()


MIB = 2**20
MEMINFO = (
    "MemTotal:       1048576 kB\nMemFree:  100 kB\nMemAvailable:    524288"
    " kB\nHugePages_Total:       0\n"
)
NETWORK_MOUNT = "40 20 0:40 / /data rw - nfs4 server:/x rw\n"
ROOT_MOUNT = "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
V2_MOUNT = "30 20 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def lay(root: Path, files: dict[str, str]) -> SystemHost:
    tree = {
        "proc/meminfo": MEMINFO,
        "proc/cpuinfo": (
            "processor\t: 0\nmodel name\t: Test CPU @ 2GHz\nprocessor\t: 1\nmodel"
            " name\t: Test CPU\n"
        ),
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": ROOT_MOUNT,
    }
    for name, text in (tree | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return SystemHost(root, {})


def test_reads_plain_figures(tmp_path):
    facts = lay(tmp_path, {}).facts([])
    assert (facts.cpu_model, facts.ram_total_bytes) == ("Test CPU @ 2GHz", 1024 * MIB)
    assert (
        facts.ram_available_bytes,
        facts.ram_limit_source,
        facts.ram_limit_bytes,
    ) == (512 * MIB, "the system", None)
    assert (facts.cpus_quota, facts.shm_free_bytes) == (None, None)


def test_tightest_cgroup_v2_level_counts(tmp_path):
    slice_ = "sys/fs/cgroup/slice"
    job = "sys/fs/cgroup/slice/job"
    files = {
        "proc/self/cgroup": "0::/slice/job\n",
        "proc/self/mountinfo": ROOT_MOUNT + V2_MOUNT,
        f"{job}/cpu.max": "max 100000\n",
        f"{job}/memory.max": "max\n",
        f"{job}/memory.current": "1\n",
        f"{slice_}/cpu.max": "350000 100000\n",
        f"{slice_}/memory.max": f"{256 * MIB}\n",
        f"{slice_}/memory.current": f"{100 * MIB}\n",
        f"{slice_}/memory.stat": f"anon 5\ninactive_file {60 * MIB}\nactive_file 3\n",
    }
    facts = lay(tmp_path, files).facts([])
    assert (facts.cpus_quota, facts.ram_available_bytes) == (3.5, (256 - 40) * MIB)
    assert (facts.ram_limit_source, facts.ram_limit_bytes) == ("cgroup v2", 256 * MIB)


def version_1(
    group: str, mounted: str, **levels: tuple[int, int, int]
) -> dict[str, str]:
    """Return files of control groups with limit, use and quota of some levels."""
    files = {
        "proc/self/cgroup": f"4:memory:{group}\n3:cpu,cpuacct:{group}\n0::/\n",
        "proc/self/mountinfo": (
            ROOT_MOUNT
            + f"35 20 0:31 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup"
            " rw,memory\n"
            + f"36 20 0:32 {mounted} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup"
            " rw,cpu,cpuacct\n"
        ),
    }
    for level, (limit, used, quota) in levels.items():
        memory = f"sys/fs/cgroup/memory/{level}"
        cpu = f"sys/fs/cgroup/cpu,cpuacct/{level}"
        files |= {
            f"{memory}/memory.limit_in_bytes": f"{limit}\n",
            f"{memory}/memory.usage_in_bytes": f"{used}\n",
        }
        files |= {
            f"{cpu}/cpu.cfs_quota_us": f"{quota}\n",
            f"{cpu}/cpu.cfs_period_us": "100000\n",
        }
    return files


def test_reads_cgroup_v1_limits(tmp_path):
    levels = {"": (9223372036854771712, 5, -1), "jobs/7": (128 * MIB, 200 * MIB, 50000)}
    facts = lay(tmp_path, version_1("/jobs/7", "/", **levels)).facts([])
    assert (facts.ram_available_bytes, facts.ram_limit_source, facts.cpus_quota) == (
        0,
        "cgroup v1",
        0.5,
    )


@pytest.mark.parametrize(
    ("group", "mounted"),
    [("/docker/a", "/docker/a"), ("/host/path", "/other"), ("/../..", "/")],
)
def test_container_uses_its_mounted_group(tmp_path, group, mounted):
    files = version_1(group, mounted, **{"": (64 * MIB, 4 * MIB, -1)})
    assert lay(tmp_path, files).facts([]).ram_available_bytes == 60 * MIB


@pytest.mark.parametrize(
    ("environment", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "4", "SLURM_CPUS_ON_NODE": "12"}, 4),
        ({"SLURM_CPUS_ON_NODE": "12"}, 12),
        ({"SLURM_CPUS_PER_TASK": "many"}, None),
        ({}, None),
    ],
)
def test_respects_cpus_of_a_slurm_task(tmp_path, environment, cpus):
    lay(tmp_path, {})
    assert SystemHost(tmp_path, environment).facts([]).cpus_slurm == cpus


def test_disk_belongs_to_its_longest_mount(tmp_path):
    mounts = (
        ROOT_MOUNT
        + NETWORK_MOUNT
        + "41 40 0:41 / /data/fast\\040disk rw,relatime shared:1 - xfs /dev/nvme0n1"
        " rw\n"
        + "42 20 0:42 / /home rw - autofs systemd rw\n"
        + "43 20 0:43 / /home rw - lustre mds:/home rw\n"
        + "a torn line\n"
    )
    host = lay(tmp_path, {"proc/self/mountinfo": mounts})
    paths = ["/data/set", "/data/fast disk/set", "/home/me", "/database", "/"]
    disks = host.facts([Path(path) for path in paths]).disks
    assert [disk.filesystem_type for disk in disks] == [
        "nfs4",
        "xfs",
        "lustre",
        "ext4",
        "ext4",
    ]
    assert [disk.is_network for disk in disks] == [True, False, True, False, False]
    assert all(disk.free_bytes is not None for disk in disks)


def test_follows_links_to_disks(tmp_path):
    host = lay(tmp_path, {"proc/self/mountinfo": ROOT_MOUNT + NETWORK_MOUNT})
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert host.facts([Path("/link/set")]).disks[0].is_network


def test_interface_without_speed_has_none(tmp_path, monkeypatch):
    interfaces = {
        "lo": SimpleNamespace(isup=True, speed=0, flags="up,loopback,running"),
        "eth1": SimpleNamespace(isup=False, speed=0, flags="broadcast"),
        "eth0": SimpleNamespace(isup=True, speed=25000, flags="up,running"),
    }
    monkeypatch.setattr(psutil, "net_if_stats", lambda: interfaces)
    host = lay(tmp_path, {})
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts = host.facts([])
    assert facts.shm_free_bytes > 0
    assert [
        (nic.name, nic.speed_bits_per_s, nic.is_up, nic.is_loopback)
        for nic in facts.nics
    ] == [
        ("eth0", 25 * 10**9, True, False),
        ("eth1", None, False, False),
        ("lo", None, True, True),
    ]


def test_requires_proc(tmp_path):
    with pytest.raises(MachineLacks, match="meminfo"):
        SystemHost(tmp_path).facts([])


@given(st.text(alphabet="ab \t\n\\"))
def test_mount_points_survive_kernel_escapes(point):
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in point)
    assert _unescape(escaped) == point
