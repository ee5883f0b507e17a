"""The command of ``docs/nodes.md``, typed on two nodes."""

import re
import shlex
import socket
import subprocess
import sys

import pytest

from testbed.datasets import write_profile_for
from tests.documentation.blocks import ROOT
from trainer.formats.run_record import read_exit

SHORT = "--set train.max_steps=3 --set train.warmup_steps=1 --set train.compile=false"


@pytest.mark.system
@pytest.mark.slow
def test_two_agents_train_one_run(patterned_dataset, tmp_path):
    page = (ROOT / "docs/nodes.md").read_text()
    line = re.search(r"^torchrun .*$", page, re.MULTILINE)[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    profile = write_profile_for(patterned_dataset, tmp_path / "profile.toml")
    typed = {
        "profiles/bert-120m-….toml": str(profile),
        "DIR": str(patterned_dataset),
        "runs/first": str(tmp_path / "run"),
        "10.0.0.1": "127.0.0.1",
        "29500": str(port),
        "--nproc-per-node 8": "--nproc-per-node 1",
    }
    for shown, value in typed.items():
        assert shown in line
        line = line.replace(shown, value)
    torchrun, *words = shlex.split(f"{line} {SHORT}")
    assert torchrun == "torchrun"
    agents = []
    for node in ("0", "1"):
        words[words.index("--node-rank") + 1] = node
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        agents.append(subprocess.Popen(command, cwd=tmp_path))
    assert [agent.wait(timeout=600) for agent in agents] == [0, 0]
    ended = read_exit(tmp_path / "run")
    assert (ended.exit_code, ended.steps) == (0, 3)
