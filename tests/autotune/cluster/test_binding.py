import pytest

from autotune.cluster.binding import why_not_bound

GPU = "0000:DC:00.0"


@pytest.fixture
def root(tmp_path):
    """Two sockets of four processors; the GPU is at the second."""
    device = tmp_path / "sys/bus/pci/devices/0000:dc:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for node, cpus in enumerate(("0-3", "4-5,6,7")):
        place = tmp_path / f"sys/devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


def test_ranks_can_be_bound_where_a_near_processor_is_allotted(root):
    assert why_not_bound([GPU], root=root, allowed=frozenset([3, 4]), has_numactl=True) is None


def test_a_machine_with_one_memory_says_minus_one(root):
    (root / "sys/bus/pci/devices/0000:dc:00.0/numa_node").write_text("-1\n")
    assert why_not_bound([GPU], root=root, allowed=frozenset([0]), has_numactl=True) is None


@pytest.mark.parametrize(
    ("gpus", "allowed", "has_numactl", "words"),
    [
        ([GPU], {4}, False, "numactl is not installed"),
        ([], {4}, True, "no GPU"),
        ([GPU], {0, 1}, True, "none of the processors near GPU"),
        (["0000:01:00.0"], {4}, True, "does not say"),
    ],
)
def test_what_would_keep_torchrun_from_starting_is_named(root, gpus, allowed, has_numactl, words):
    assert words in why_not_bound(gpus, root=root, allowed=frozenset(allowed), has_numactl=has_numactl)
