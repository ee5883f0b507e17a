"""Ranks on one node and on several; bash and torchrun are real, srun is a few lines."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cluster import torchrun
from autotune.cluster.job_script import Shape, measure_script, read_template
from autotune.cluster.site_file import SiteFile
from autotune.errors import MachineLacks
from tests.autotune.cluster.conftest import SRUN


def test_nodes_meet_by_address_and_one_alone_meets_nobody_without_options_that_torch_does_not_have():
    meeting = (4, "10.0.0.1:20012", "12")
    said = {"ranks": 2, "shutdown_s": 105}
    words = ["-m", "trainer", "--out", "r"]
    assert torchrun.torchrun_command(
        "python", words, torch_version="2.13.0+cu128", meeting=meeting, **said
    ) == [
        "python",
        "-P",
        "-m",
        "torch.distributed.run",
        "--nnodes=4",
        "--node-rank=$SLURM_NODEID",
        "--rdzv-backend=static",
        "--rdzv-endpoint=10.0.0.1:20012",
        "--rdzv-id=12",
        "--local-addr=$address",
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--shutdown-timeout=105",
        "--no-python",
        "python",
        "-u",
        "-P",
        "-m",
        "trainer",
        "--out",
        "r",
    ]
    for version in ("2.12.1", "nonsense"):
        alone = torchrun.torchrun_command(
            "python", ["train.py"], torch_version=version, **said
        )
        assert alone[4:] == [
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=0",
            "--no-python",
            "python",
            "-u",
            "-P",
            "train.py",
        ]


CHILD = """
import signal, sys, time
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, heard)
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, sys
from autotune.cluster.torchrun import run_child
sys.exit(run_child([sys.executable, "-c", {CHILD!r}], os.environ))
"""


def test_the_childs_code_is_returned_and_signals_are_as_before():
    before = signal.getsignal(signal.SIGINT)
    assert (
        torchrun.run_child([sys.executable, "-c", "raise SystemExit(5)"], os.environ)
        == 5
    )
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("number", "heard"),
    [
        (signal.SIGTERM, "SIGTERM\n"),
        (signal.SIGINT, "SIGINT\n"),
        (signal.SIGUSR1, "SIGTERM\n"),
        (signal.SIGKILL, ""),
    ],
)
def test_signals_are_passed_on_as_ones_that_torchrun_knows_and_no_child_outlives_who_started_it(
    number, heard
):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children()
        parent.send_signal(number)
        assert parent.communicate(timeout=30)[0] == heard
    assert parent.returncode == (7 if heard else -signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=10)[1] == []


@given(st.integers(min_value=0, max_value=2**32))
def test_a_jobs_ports_are_distinct_and_below_those_of_outgoing_connections(job):
    ports = torchrun.derived_ports(job)
    assert len(set(ports)) == torchrun.CANDIDATES
    assert all(20000 <= port < 32768 for port in ports)
    # Jobs that follow each other.
    assert len({torchrun.derived_ports(one)[0] for one in range(job, job + 100)}) == 100


def test_the_first_port_on_which_nobody_listens_is_taken_and_those_before_are_named():
    ports = torchrun.derived_ports(12)
    assert torchrun.choose_port(12, lambda port: True) == (ports[0], ())
    assert torchrun.choose_port(12, lambda port: port not in ports[:2]) == (
        ports[2],
        ports[:2],
    )
    with pytest.raises(MachineLacks, match=f"job 12.*{ports[-1]}"):
        torchrun.choose_port(12, lambda port: False)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert not torchrun.is_free("127.0.0.1", port)
    assert torchrun.is_free("127.0.0.1", port)


LOOPBACK = {"lo": ["127.0.0.1"]}
ADDRESSES = LOOPBACK | {"eth0": ["10.0.0.5"], "ib0": ["10.1.0.5"], "down0": []}


@pytest.mark.parametrize(
    ("interface", "addresses", "of_name", "expected"),
    [
        ("ib0", ADDRESSES, ["10.0.0.5"], "10.1.0.5"),
        (None, ADDRESSES, ["10.1.0.5"], "10.1.0.5"),
        (None, ADDRESSES, ["127.0.1.1"], "10.0.0.5"),
        (None, ADDRESSES, ["192.168.7.7"], "10.0.0.5"),
        (None, ADDRESSES, [], "10.0.0.5"),
        (None, LOOPBACK, ["127.0.1.1"], "127.0.0.1"),
    ],
)
def test_the_address_is_the_interfaces_else_the_names_else_a_reachable_one(
    interface, addresses, of_name, expected
):
    assert torchrun.own_address(interface, addresses, of_name) == expected
    own = torchrun.own_address(
        None, torchrun.read_addresses(), torchrun.resolve_own_name()
    )
    assert (
        own
        in torchrun.read_addresses()[
            torchrun.interface_of(own, torchrun.read_addresses())
        ]
    )
    assert (
        torchrun.interface_of("10.1.0.5", ADDRESSES),
        torchrun.interface_of("127.0.0.1", {}),
    ) == ("ib0", "lo")


@pytest.mark.parametrize("interface", ["eth9", "down0"])
def test_an_interface_without_an_address_is_refused_with_those_that_have_one(interface):
    with pytest.raises(MachineLacks, match="interfaces with one: lo, eth0, ib0"):
        torchrun.own_address(interface, ADDRESSES, [])


ENVIRONMENT = {
    "SLURM_JOB_ID": "7",
    "SLURM_CPUS_PER_TASK": "12",
    "SLURMD_NODENAME": "n4",
}
RANK = """
import os, sys
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(f"{sys.argv[2]} {os.environ['WORLD_SIZE']}")
"""


def test_nodes_of_a_job_are_reached_by_one_srun_that_names_this_node_and_is_told_their_processors():
    command = torchrun.on_nodes_of_job(3, 2, "2.13.0", ENVIRONMENT)(
        ["-m", "module", "a b"]
    )
    assert {
        "--nodes=3",
        "--ntasks=3",
        "--ntasks-per-node=1",
        "--nodelist=n4",
        "--cpus-per-task=12",
    } <= set(command)
    assert (command[0], command[-3:-1]) == ("srun", ["bash", "-c"])
    for words in (
        " --local-addr=$address ",
        " --node-rank=$SLURM_NODEID ",
        " --nproc-per-node=2 ",
    ):
        assert words in command[-1]
    assert command[-1].endswith("-m module 'a b'")
    # In a container the script of the job is asked.
    command = torchrun.on_nodes_of_job(
        3, 2, "2.13.0", ENVIRONMENT | {"AUTOTUNE_STARTER": "there"}
    )(["-m", "module"])
    assert command[:7] == [
        sys.executable,
        "-P",
        "-m",
        "autotune",
        "job",
        "outside",
        "--nodes=3",
    ]
    assert "--node-rank=$SLURM_NODEID" in command[7]


@pytest.mark.parametrize(
    ("named", "interface"), [({}, "eth7"), ({"GLOO_SOCKET_IFNAME": "ib1"}, "ib1")]
)
def test_gloo_goes_by_the_interface_of_the_nodes_own_address(
    put, monkeypatch, named, interface
):
    python = put(
        "python",
        '[ "$5" = address ] && echo 10.0.0.1 eth7 || echo "$GLOO_SOCKET_IFNAME $@"',
    )
    monkeypatch.setattr(sys, "executable", str(python))
    script = torchrun.on_nodes_of_job(2, 1, "2.13.0", ENVIRONMENT)(["-m", "module"])[-1]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_NODEID": "0"} | named
    told = subprocess.check_output(["bash", "-c", script], text=True, env=environment)
    assert told.startswith(f"{interface} -P -m torch.distributed.run")
    assert "--local-addr=10.0.0.1 " in told


def test_ranks_follow_the_numbers_of_their_nodes_whatever_their_addresses(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchruns = []
    # By their text, the second is the first.
    for node, address in ((1, "127.0.0.1"), (0, "127.0.0.9")):
        words = torchrun.torchrun_command(
            sys.executable,
            [str(tmp_path / "rank.py"), str(tmp_path), f"node-{node}"],
            ranks=1,
            torch_version="2.13.0",
            meeting=(2, f"127.0.0.1:{port}", "7"),
        )
        told = os.environ | {"address": address, "SLURM_NODEID": str(node)}
        torchruns.append(
            subprocess.Popen(["bash", "-c", "exec " + " ".join(words)], env=told)
        )
    assert [process.wait(timeout=120) for process in torchruns] == [0, 0]
    assert [Path(tmp_path, str(rank)).read_text() for rank in (0, 1)] == [
        "node-0 2",
        "node-1 2",
    ]


ASK = """
import os, sys
from pathlib import Path
from autotune.cluster.torchrun import start_outside
def ask(nodes, words):
    return start_outside(Path(os.environ["AUTOTUNE_STARTER"]), nodes, words)
"""


@pytest.fixture
def job(put, tmp_path):
    """Runs a Python line as the measuring command of a job of two nodes."""
    (tmp_path / "jobs").mkdir()
    put("srun", SRUN.replace("shift", 'echo "$word"; shift'))

    def start(line: str) -> subprocess.Popen[str]:
        site = SiteFile(command_prefix="env -u NOTHING")
        script = measure_script(
            site,
            read_template("measure", site, None),
            name="network",
            purpose="Tests.",
            with_srun=False,
            command=[sys.executable, "-uc", ASK + line],
            shape=Shape(nodes=2, cpus=3),
            log=Path("jobs/network-%j.log"),
        )
        (tmp_path / "job.sh").write_text(script)
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=os.environ | {"SLURMD_NODENAME": "n4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def test_what_is_asked_for_runs_under_srun_one_after_the_other_and_its_words_and_codes_come_back(
    job, tmp_path
):
    process = job(
        "print([ask(n, f'echo said {n}; exit {n}') for n in (1, 2)]); sys.exit(9)"
    )
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 9, said
    for nodes in (1, 2):
        assert (
            f"--nodes={nodes}\n--ntasks={nodes}\n--ntasks-per-node=1\n--nodelist=n4\n"
            in said
        )
    assert "--cpus-per-task=3\n" in said
    assert said.index("said 1") < said.index("said 2")
    assert "[1, 2]" in said
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "said", "code"),
    [(signal.SIGTERM, "code 143", 0), (signal.SIGKILL, "", 137)],
)
def test_what_was_started_ends_with_who_asked(job, tmp_path, number, said, code):
    process = job(
        "print('asked', os.getpid()); print('code', ask(2, 'echo $$ > pid; exec sleep"
        " 100'))"
    )
    asker, deadline_s = int(process.stdout.readline().split()[1]), time.monotonic() + 20
    while not (
        pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").is_file() else ""
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.kill(asker, number)
    assert said in process.communicate(timeout=30)[0]
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
