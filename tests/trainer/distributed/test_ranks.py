import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.oracles import config_of
from trainer.distributed import ranks as ranks_module
from trainer.distributed.ranks import join_ranks

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
    ranks = join_ranks(config_of(device="cuda"), environment={})
    assert addresses == ["0000:dc:00.0"]
    assert ranks.cpus_before_binding == 128
