import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cluster.together import on_nodes_of_job
from autotune.cluster.torchrun import Meeting, torchrun_command

ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "12", "SLURMD_NODENAME": "n4"}
RANK = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{sys.argv[2]} {os.environ['WORLD_SIZE']}")
"""


def test_nodes_of_a_job_are_reached_by_one_srun_that_names_this_node_and_is_told_their_processors():
    command = on_nodes_of_job(3, 2, "2.13.0", ENVIRONMENT)(["-m", "module", "a b"])
    assert command[0] == "srun"
    asked = {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=n4", "--cpus-per-task=12"}
    assert asked <= set(command)
    script = command[-1]
    assert "--local-addr=$address" in script
    assert "--node-rank=$SLURM_NODEID" in script
    assert "--nproc-per-node=2" in script
    assert script.endswith("-m module 'a b'")


@pytest.mark.parametrize(("named", "interface"), [({}, "eth7"), ({"GLOO_SOCKET_IFNAME": "ib1"}, "ib1")])
def test_gloo_goes_by_the_interface_of_the_nodes_own_address(tmp_path, monkeypatch, named, interface):
    (tmp_path / "python").write_text(
        '#!/bin/bash\n[ "$4" = address ] && echo 10.0.0.1 eth7 || echo "$GLOO_SOCKET_IFNAME $@"'
    )
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    script = on_nodes_of_job(2, 1, "2.13.0", ENVIRONMENT)(["-m", "module"])[-1]
    told = subprocess.check_output(
        ["bash", "-c", script], text=True, env={"PATH": "/usr/bin:/bin", "SLURM_NODEID": "0"} | named
    )
    assert told.startswith(f"{interface} -m torch.distributed.run")
    assert "--local-addr=10.0.0.1 " in told


def test_in_a_container_the_script_of_the_job_is_asked():
    command = on_nodes_of_job(3, 2, "2.13.0", ENVIRONMENT | {"AUTOTUNE_STARTER": "there"})(["-m", "module"])
    assert command[:6] == [sys.executable, "-m", "autotune", "launch", "outside", "--nodes=3"]
    assert "--node-rank=$SLURM_NODEID" in command[6]


def test_ranks_follow_the_numbers_of_their_nodes_whatever_their_addresses(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchruns = []
    for node, address in ((1, "127.0.0.1"), (0, "127.0.0.9")):  # by their text, the second is the first
        meeting = Meeting(nodes=2, endpoint=f"127.0.0.1:{port}", job="7", address=address, node_rank=str(node))
        words = torchrun_command(
            sys.executable, [str(tmp_path / "rank.py"), str(tmp_path), f"node-{node}"], ranks=1,
            torch_version="2.13.0", meeting=meeting,
        )  # fmt: skip
        torchruns.append(subprocess.Popen(words))
    assert [process.wait(timeout=120) for process in torchruns] == [0, 0]
    assert [Path(tmp_path, str(rank)).read_text() for rank in (0, 1)] == ["node-0 2", "node-1 2"]
