import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.test_preflight import CONFIG
from trainer.distributed import ranks as ranks_module
from trainer.distributed.cpu_binding import NUMA_VARIABLE, bind_to_nearest_cpus
from trainer.distributed.ranks import join_ranks, set_cuda_defaults

ROOT = Path(__file__).parents[3]
RANK_PROGRAM = """
import json, os, sys
from pathlib import Path
from tests.trainer.oracles import config_of
from trainer.distributed.ranks import join_ranks, leave_ranks
rank = sys.argv[1]
environment = {
    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"
}
ranks = join_ranks(config_of(), environment, Path(sys.argv[2]))
value = 10.0 ** ranks.rank
print(json.dumps({
    "sums": ranks.all_reduce_sum(value, 1.0),
    "maxima": ranks.all_reduce_max(value, -value),
    "values": ranks.all_gather_float(value),
    "objects": ranks.all_gather_object([rank]),
    "broadcast": ranks.broadcast_object([rank]),
}))
leave_ranks(together=True)
"""


@pytest.mark.system
def test_ranks_of_one_host_connect_through_a_file(tmp_path):
    # Without an address or a port, as torchrun sets them.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MASTER_")
    }
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = str(tmp_path / "rendezvous")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), rendezvous],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(2)
    ]
    results = []
    for process in processes:
        stdout, _ = process.communicate(timeout=180)
        results.append(json.loads(stdout))
    assert [process.returncode for process in processes] == [0, 0]
    expected = {
        "sums": [11.0, 2.0],
        "maxima": [10.0, -1.0],
        "values": [1.0, 10.0],
        "objects": [["0"], ["1"]],
        "broadcast": ["0"],
    }
    assert results == [expected, expected]


OLD_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
VARIABLE = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"
NOT_EXPANDABLE = "expandable_segments:False"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {VARIABLE: EXPANDABLE}),
        (
            {VARIABLE: "max_split_size_mb:64"},
            {VARIABLE: f"max_split_size_mb:64,{EXPANDABLE}"},
        ),
        ({VARIABLE: NOT_EXPANDABLE}, {}),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", VARIABLE: EXPANDABLE}, {}),
        (
            {OLD_VARIABLE: "max_split_size_mb:64"},
            {OLD_VARIABLE: f"max_split_size_mb:64,{EXPANDABLE}"},
        ),
        (
            {OLD_VARIABLE: "max_split_size_mb:64", VARIABLE: EXPANDABLE},
            {OLD_VARIABLE: f"max_split_size_mb:64,{EXPANDABLE}"},
        ),
        ({OLD_VARIABLE: "", VARIABLE: EXPANDABLE}, {OLD_VARIABLE: EXPANDABLE}),
        ({OLD_VARIABLE: NOT_EXPANDABLE, VARIABLE: "max_split_size_mb:64"}, {}),
        ({VARIABLE: "backend:cudaMallocAsync"}, {}),
    ],
)
def test_segments_expand_unless_you_set_them(given, added):
    environment = dict(given)
    set_cuda_defaults(environment)
    del environment["TORCHINDUCTOR_COMPILE_THREADS"]
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | given | added


def test_compile_threads_are_at_most_eight():
    environment = {}
    set_cuda_defaults(environment)
    cpus = len(os.sched_getaffinity(0))
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == str(min(8, cpus))


GPU_ADDRESS = "0000:DC:00.0"


def write_machine(root: Path, node: int, *cpu_lists: str) -> Path:
    """Write the ``/sys`` of a machine with a GPU at one of its NUMA nodes."""
    files = {root / "sys/bus/pci/devices/0000:dc:00.0/numa_node": str(node)}
    for number, cpu_list in enumerate(cpu_lists):
        files[root / f"sys/devices/system/node/node{number}/cpulist"] = cpu_list
    for path, text in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("address", "node", "environment", "near_cpus"),
    [
        pytest.param(GPU_ADDRESS, 1, {}, {4, 5}, id="near"),
        pytest.param(GPU_ADDRESS, 0, {}, set(), id="near CPUs not allowed"),
        pytest.param(GPU_ADDRESS, -1, {}, set(), id="single node"),
        pytest.param(GPU_ADDRESS, 7, {}, set(), id="node not listed"),
        pytest.param(GPU_ADDRESS, 1, {NUMA_VARIABLE: "0"}, set(), id="disabled"),
        pytest.param("0000:01:00.0", 1, {}, set(), id="another GPU"),
    ],
)
def test_rank_is_bound_to_allowed_cpus_near_its_gpu(
    tmp_path, monkeypatch, address, node, environment, near_cpus
):
    cpus_by_thread = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", cpus_by_thread.__setitem__)
    root = write_machine(tmp_path, node, "0-1", "4-5,6,7")
    assert bind_to_nearest_cpus(address, environment, root) == near_cpus
    assert cpus_by_thread.get(os.getpid(), set()) == near_cpus


BINDING_PROGRAM = """
import os, pathlib, sys, threading
import torch
from trainer.distributed import ranks as ranks_module
from trainer.distributed.cpu_binding import bind_to_nearest_cpus
torch.ones(512, 512) @ torch.ones(512, 512)
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
near = bind_to_nearest_cpus("0000:dc:00.0", root=pathlib.Path(sys.argv[1]))
threads = [int(name) for name in os.listdir("/proc/self/task")]
masks = {frozenset(os.sched_getaffinity(thread)) for thread in threads}
assert masks == {near}, masks
if os.fork() == 0:
    os._exit(0 if os.sched_getaffinity(0) == near else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(*near)
"""


@pytest.mark.system
def test_every_thread_and_child_is_bound(tmp_path):
    last_cpu = (os.cpu_count() or 1) - 1
    if last_cpu == 0:
        pytest.skip("this machine has one processor: nothing can be bound to less")
    root = write_machine(tmp_path, 0, str(last_cpu))
    process = subprocess.run(
        [sys.executable, "-c", BINDING_PROGRAM, root],
        capture_output=True,
        text=True,
        check=False,
        # A test that runs beside others has one processor; this one needs two.
        preexec_fn=lambda: os.sched_setaffinity(0, range(last_cpu + 1)),
    )
    assert (process.stdout, process.returncode) == (f"{last_cpu}\n", 0), process.stderr


def test_joining_binds_a_rank(monkeypatch):
    # Trials, sweeps of workers and training join alike, so their figures are of the
    # same CPUs.
    addresses = []
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)

    def bind(address):
        addresses.append(address)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    monkeypatch.setattr(
        ranks_module,
        "pick_device",
        lambda _, local_rank: torch.device("cuda", local_rank),
    )
    monkeypatch.setattr(ranks_module, "bind_to_nearest_cpus", bind)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    ranks = join_ranks(CONFIG.model_copy(update={"device": "cuda"}), environment={})
    assert addresses == ["0000:dc:00.0"]
    assert ranks.cpus_before_binding == 128
