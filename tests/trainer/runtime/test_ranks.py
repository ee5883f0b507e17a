import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.tiny_models import config_of
from trainer.runtime import ranks as ranks_module
from trainer.runtime.ranks import Ranks, join_ranks

ROOT = Path(__file__).parents[3]
COLLECTIVES_PROGRAM = """
import json, sys
from pathlib import Path
from tests.trainer.tiny_models import config_of
from trainer.runtime.ranks import join_ranks, leave_ranks
rank = int(sys.argv[1])
environment = {
    "RANK": str(rank),
    "LOCAL_RANK": str(rank),
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}
ranks = join_ranks(config_of(), environment, rendezvous=Path(sys.argv[2]))
value = [1.0, 10.0][rank]
name = ["zero", "one"][rank]
print(json.dumps({
    "sums": ranks.all_reduce_sum(value, 1.0),
    "maxima": ranks.all_reduce_max(value, -value),
    "values": ranks.all_gather_float(value),
    "objects": ranks.all_gather_object([name]),
    "broadcast": ranks.broadcast_object([name]),
}))
leave_ranks(together=True)
"""
"""Prints the results of every collective as JSON. Rank 0 has the value 1.0 and the name
"zero", rank 1 has 10.0 and "one"."""


@pytest.fixture
def processes(tmp_path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that run the program, and connect through a file."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # torchrun's address and port, without which only the file is left.
        if not name.startswith("MASTER_")
    }
    # gloo may choose an interface that this machine cannot reach itself by.
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = tmp_path / "rendezvous"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVES_PROGRAM, str(rank), str(rendezvous)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.system
def test_collectives_work_after_file_rendezvous(processes):
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    results_of_ranks = [json.loads(output) for output in outputs]
    expected = {
        "sums": [11.0, 2.0],
        "maxima": [10.0, -1.0],
        "values": [1.0, 10.0],
        "objects": [["zero"], ["one"]],
        "broadcast": ["zero"],
    }
    assert results_of_ranks == [expected, expected]


LEAVING_PROGRAM = """
import gc
import psutil
import torch.distributed as dist
from trainer.runtime.ranks import leave_ranks
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
threads = psutil.Process().num_threads()
leave_ranks(together=True)
gc.collect()
print(threads - psutil.Process().num_threads())
"""
"""Leaves a process group, and prints how many threads ended with it."""


@pytest.mark.system
def test_leaving_joins_no_thread_of_gloo():
    # Joining one can wait forever: see ``_LEFT_GROUPS``.
    output = subprocess.check_output(
        [sys.executable, "-c", LEAVING_PROGRAM],
        text=True,
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        timeout=180,
    )
    assert output == "0\n"


@pytest.fixture
def bound_addresses(monkeypatch) -> list[str]:
    """PCI addresses to whose CPUs a rank of a pretended machine was bound.

    The machine has 128 CPUs, and a GPU at the address 0000:dc:00.0.
    """
    addresses: list[str] = []
    available_cpus = set(range(128))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)

    def pick_gpu(_device_type, local_rank):
        return torch.device("cuda", local_rank)

    def bind_to_one_cpu(address):
        addresses.append(address)
        available_cpus.intersection_update({0})

    monkeypatch.setattr(ranks_module, "pick_device", pick_gpu)
    monkeypatch.setattr(ranks_module, "bind_to_nearest_cpus", bind_to_one_cpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: available_cpus)
    return addresses


def join_alone() -> Ranks:
    """Join as the only rank: without torchrun's environment variables."""
    return join_ranks(config_of(device="cuda"), environment={})


def test_joining_binds_to_cpus_near_the_gpu(bound_addresses):
    join_alone()
    assert bound_addresses == ["0000:dc:00.0"]


@pytest.mark.usefixtures("bound_addresses")
def test_cpus_are_counted_before_binding():
    assert join_alone().cpus_before_binding == 128
