"""Ranks that meet through a file, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.test_preflight import CONFIG
from trainer.distributed.cpu_binding import NUMA_VARIABLE, bind_to_nearest_cpus
from trainer.distributed.ranks import join_ranks, set_cuda_defaults

ROOT = Path(__file__).parents[3]
RANK = """
import json, os, sys
from pathlib import Path
from tests.trainer.oracles import config_of
from trainer.distributed.ranks import join_ranks, leave_ranks
rank = sys.argv[1]
environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ranks = join_ranks(config_of(), environment, Path(sys.argv[2]))
value = 10.0 ** ranks.rank
agreed = [ranks.all_reduce_sum(value, 1.0), ranks.all_reduce_max(value, -value), ranks.all_gather_float(value)]
print(json.dumps([*agreed, ranks.all_gather_object([rank]), ranks.broadcast_object([rank])]))
leave_ranks(together=True)
"""


@pytest.mark.system
def test_ranks_of_one_host_meet_through_a_file_and_agree(tmp_path):
    # Nothing of torchrun's: neither an address nor a port.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MASTER_")
    }
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    commands = [
        [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")]
        for rank in range(2)
    ]
    both = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        for command in commands
    ]
    found = [json.loads(process.communicate(timeout=180)[0]) for process in both]
    assert (
        found == [[[11.0, 2.0], [10.0, -1.0], [1.0, 10.0], [["0"], ["1"]], ["0"]]] * 2
    )
    assert [process.returncode for process in both] == [0, 0]


OLDER, NEWER, ON = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "expandable_segments:True",
)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {NEWER: ON}),
        ({NEWER: "max_split_size_mb:64"}, {NEWER: f"max_split_size_mb:64,{ON}"}),
        ({NEWER: "expandable_segments:False"}, {}),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", NEWER: ON}, {}),
        ({OLDER: "max_split_size_mb:64"}, {OLDER: f"max_split_size_mb:64,{ON}"}),
        (
            {OLDER: "max_split_size_mb:64", NEWER: ON},
            {OLDER: f"max_split_size_mb:64,{ON}"},
        ),
        ({OLDER: "", NEWER: ON}, {OLDER: ON}),
        ({OLDER: "expandable_segments:False", NEWER: "max_split_size_mb:64"}, {}),
        ({NEWER: "backend:cudaMallocAsync"}, {}),
    ],
)
def test_segments_expand_unless_the_variable_that_torch_reads_says_otherwise(
    given, added
):
    environment = dict(given)
    set_cuda_defaults(environment)
    assert environment.pop("TORCHINDUCTOR_COMPILE_THREADS") == str(
        min(8, len(os.sched_getaffinity(0)))
    )
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | given | added


GPU = "0000:DC:00.0"
PROGRAM = """
import os, pathlib, sys, threading
import torch
from trainer.distributed.cpu_binding import bind_to_nearest_cpus
torch.ones(512, 512) @ torch.ones(512, 512)
ended = threading.Event()
threading.Thread(target=ended.wait, daemon=True).start()
near = bind_to_nearest_cpus("0000:dc:00.0", root=pathlib.Path(sys.argv[1]))
found = {frozenset(os.sched_getaffinity(int(one))) for one in os.listdir("/proc/self/task")}
assert found == {near}, found
if os.fork() == 0:
    os._exit(0 if os.sched_getaffinity(0) == near else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(*near)
"""


def machine(root: Path, node: int, *cpus: str) -> Path:
    """A machine of several NUMA nodes, each with the processors of one text, and a GPU
    at one of them."""
    places = {root / "sys/bus/pci/devices/0000:dc:00.0/numa_node": str(node)}
    places |= {
        root / f"sys/devices/system/node/node{number}/cpulist": text
        for number, text in enumerate(cpus)
    }
    for path, text in places.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    return root


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
    ids=[
        "near",
        "not allotted",
        "a single node",
        "not listed",
        "not wanted",
        "another GPU",
    ],
)
def test_a_rank_keeps_to_the_allotted_processors_of_its_gpus_node_or_stays_unbound(
    tmp_path, monkeypatch, address, node, environment, near
):
    bound = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5})
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    assert (
        bind_to_nearest_cpus(
            address, environment, machine(tmp_path, node, "0-1", "4-5,6,7")
        )
        == near
    )
    assert bound.get(os.getpid(), set()) == near


@pytest.mark.system
def test_every_thread_and_every_child_is_bound(tmp_path):
    last = (os.cpu_count() or 1) - 1
    if last == 0:
        pytest.skip("this machine has one processor: nothing can be bound to less")
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, machine(tmp_path, 0, str(last))],
        capture_output=True,
        text=True,
        check=False,
        # A test that runs beside others has one processor; this one needs two.
        preexec_fn=lambda: os.sched_setaffinity(0, range(last + 1)),
    )
    assert (child.stdout, child.returncode) == (f"{last}\n", 0), child.stderr


def test_joining_binds_a_rank_and_keeps_how_many_processors_there_were(monkeypatch):
    """Trials, sweeps of workers and training join alike: their figures are of the same
    processors."""
    seen = {}
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)

    def bind(address):
        seen["address"] = address
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})

    monkeypatch.setattr(
        "trainer.distributed.ranks.pick_device",
        lambda _, local_rank: torch.device("cuda", local_rank),
    )
    monkeypatch.setattr("trainer.distributed.ranks.bind_to_nearest_cpus", bind)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    ranks = join_ranks(CONFIG.model_copy(update={"device": "cuda"}), environment={})
    assert seen == {"address": "0000:dc:00.0"}
    assert ranks.cpus_before_binding == 128
