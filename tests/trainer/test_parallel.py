"""Ranks that meet through a file, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.oracles import config_of
from trainer.parallel import join_ranks, set_cuda_defaults

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, sys
from pathlib import Path
from tests.trainer.oracles import config_of
from trainer.parallel import join_ranks, leave_ranks
rank = sys.argv[1]
environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
ranks = join_ranks(config_of(), environment, Path(sys.argv[2]))
value = 10.0 ** ranks.rank
agreed = [ranks.sum(value, 1.0), ranks.max(value, -value), ranks.each(value)]
print(json.dumps([*agreed, ranks.gather([rank]), ranks.tell([rank])]))
leave_ranks(together=True)
"""


@pytest.mark.system
def test_ranks_of_one_host_meet_through_a_file_and_agree(tmp_path):
    # Nothing of torchrun's: neither an address nor a port.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "meet")] for rank in range(2)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) for command in commands
    ]
    found = [json.loads(process.communicate(timeout=180)[0]) for process in both]
    assert found == [[[11.0, 2.0], [10.0, -1.0], [1.0, 10.0], [["0"], ["1"]], ["0"]]] * 2
    assert [process.returncode for process in both] == [0, 0]


def test_a_rank_alone_agrees_with_itself():
    ranks = join_ranks(config_of(), environment={})
    assert (ranks.sum(1.0, 2.0), ranks.max(1.0, 2.0), ranks.each(3.0)) == ([1.0, 2.0], [1.0, 2.0], [3.0])
    assert (ranks.gather("a"), ranks.tell("a")) == (["a"], "a")


OLDER, NEWER, ON = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {NEWER: ON}),
        ({NEWER: "max_split_size_mb:64"}, {NEWER: f"max_split_size_mb:64,{ON}"}),
        ({NEWER: "expandable_segments:False"}, {}),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", NEWER: ON}, {}),
        ({OLDER: "max_split_size_mb:64"}, {OLDER: f"max_split_size_mb:64,{ON}"}),
        ({OLDER: "max_split_size_mb:64", NEWER: ON}, {OLDER: f"max_split_size_mb:64,{ON}"}),
        ({OLDER: "", NEWER: ON}, {OLDER: ON}),
        ({OLDER: "expandable_segments:False", NEWER: "max_split_size_mb:64"}, {}),
        ({NEWER: "backend:cudaMallocAsync"}, {}),
    ],
)
def test_segments_expand_unless_the_variable_that_torch_reads_says_otherwise(given, added):
    environment = dict(given)
    set_cuda_defaults(environment)
    assert environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | given | added
