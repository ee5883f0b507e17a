import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.test_preflight import CONFIG
from trainer.binding import NUMA_VARIABLE, bind_near
from trainer.parallel import join_ranks

GPU = "0000:DC:00.0"
PROGRAM = """
import os, pathlib, sys, threading
import torch
from trainer.binding import bind_near
torch.ones(512, 512) @ torch.ones(512, 512)
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
near = bind_near("0000:dc:00.0", root=pathlib.Path(sys.argv[1]))
found = {frozenset(os.sched_getaffinity(int(one))) for one in os.listdir("/proc/self/task")}
assert found == {near}, found
if os.fork() == 0:
    os._exit(0 if os.sched_getaffinity(0) == near else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(*near)
"""


@pytest.fixture
def root(tmp_path):
    """A function that writes a machine of several NUMA nodes, each with the processors of one text."""

    def write(node: int, *cpus: str):
        device = tmp_path / "sys/bus/pci/devices/0000:dc:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        for number, text in enumerate(cpus):
            place = tmp_path / f"sys/devices/system/node/node{number}"
            place.mkdir(parents=True)
            (place / "cpulist").write_text(f"{text}\n")
        return tmp_path

    return write


@pytest.fixture
def affinity(monkeypatch):
    """Processors 2 to 5 are allotted; what threads are bound to is kept."""
    bound = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    return bound


@pytest.mark.parametrize(
    ("address", "node", "environment", "near"),
    [
        (GPU, 1, {}, {4, 5}),
        (GPU, 0, {}, set()),
        (GPU, -1, {}, set()),
        (GPU, 7, {}, set()),
        (GPU, 1, {NUMA_VARIABLE: "0"}, set()),
        ("0000:01:00.0", 1, {}, set()),
    ],
    ids=["near", "not allotted", "a single node", "not listed", "not wanted", "another GPU"],
)
def test_a_rank_keeps_to_the_allotted_processors_of_its_gpus_node_or_stays_unbound(
    root, affinity, address, node, environment, near
):
    assert bind_near(address, environment, root(node, "0-1", "4-5,6,7")) == near
    assert affinity.get(os.getpid(), set()) == near


@pytest.mark.system
def test_every_thread_and_every_child_is_bound(root):
    last = (os.cpu_count() or 1) - 1
    if last == 0:
        pytest.skip("this machine has one processor: nothing can be bound to less")
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root(0, str(last)))], capture_output=True, text=True, check=False,
        # A test that runs beside others has one processor; this one needs two.
        preexec_fn=lambda: os.sched_setaffinity(0, range(last + 1)),
    )  # fmt: skip
    assert (child.stdout, child.returncode) == (f"{last}\n", 0), child.stderr


def test_joining_binds_a_rank_and_keeps_how_many_processors_there_were(monkeypatch):
    """Trials, sweeps of workers and training join alike: their figures are of the same processors."""
    seen = {}
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)

    def bind(address):
        seen["address"] = address
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    monkeypatch.setattr("trainer.parallel.pick_device", lambda _, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr("trainer.parallel.bind_near", bind)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    ranks = join_ranks(CONFIG.model_copy(update={"device": "cuda"}), environment={})
    assert seen == {"address": "0000:dc:00.0"}
    assert ranks.cpus_before_binding == 128
