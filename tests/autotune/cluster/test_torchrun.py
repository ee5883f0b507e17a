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


def test_nodes_meet_by_address():
    meeting = (4, "10.0.0.1:20012", "12")
    options = {"ranks": 2, "shutdown_s": 105}
    words = ["-m", "trainer", "--out", "r"]
    assert torchrun.torchrun_command(
        "python", words, torch_version="2.13.0+cu128", meeting=meeting, **options
    ) == [
        "python",
        "-P",
        "-m",
        "autotune.cluster.job",
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


def test_one_node_runs_standalone():
    options = {"ranks": 2, "shutdown_s": 105}
    for version in ("2.12.1", "nonsense"):
        alone = torchrun.torchrun_command(
            "python", ["train.py"], torch_version=version, **options
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


def test_returns_the_childs_code():
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
def test_passes_signals_on_to_the_child(number, heard):
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
def test_ports_of_jobs_are_distinct(job):
    ports = torchrun.derived_ports(job)
    assert len(set(ports)) == torchrun.CANDIDATES
    assert all(20000 <= port < 32768 for port in ports)
    # Jobs that follow each other.
    assert (
        len(
            {
                torchrun.derived_ports(other_job)[0]
                for other_job in range(job, job + 100)
            }
        )
        == 100
    )


def test_takes_the_first_free_port():
    ports = torchrun.derived_ports(12)
    assert torchrun.choose_port(12, lambda port: True) == (ports[0], ())
    assert torchrun.choose_port(12, lambda port: port not in ports[:2]) == (
        ports[2],
        ports[:2],
    )
    with pytest.raises(MachineLacks, match=f"job 12.*{ports[-1]}"):
        torchrun.choose_port(12, lambda port: False)


def test_listening_port_is_not_free():
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
    ids=[
        "named interface",
        "address of host name",
        "loopback host name",
        "unknown host name",
        "no host name",
        "only loopback",
    ],
)
def test_chooses_address_of_named_interface(interface, addresses, of_name, expected):
    assert torchrun.own_address(interface, addresses, of_name) == expected


def test_own_address_belongs_to_an_interface():
    address = torchrun.own_address(
        None, torchrun.read_addresses(), torchrun.resolve_own_name()
    )
    assert (
        address
        in torchrun.read_addresses()[
            torchrun.interface_of(address, torchrun.read_addresses())
        ]
    )


def test_finds_interface_of_an_address():
    assert (
        torchrun.interface_of("10.1.0.5", ADDRESSES),
        torchrun.interface_of("127.0.0.1", {}),
    ) == ("ib0", "lo")


@pytest.mark.parametrize("interface", ["eth9", "down0"])
def test_rejects_interface_without_address(interface):
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
text = f"{sys.argv[2]} {os.environ['WORLD_SIZE']}"
Path(sys.argv[1], os.environ["RANK"]).write_text(text)
"""


def test_srun_reaches_every_node_of_a_job():
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


def test_container_asks_the_job_script_for_srun():
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
def test_gloo_uses_interface_of_the_nodes_address(put, monkeypatch, named, interface):
    python = put(
        "python",
        '[ "$5" = address ] && echo 10.0.0.1 eth7 || echo "$GLOO_SOCKET_IFNAME $@"',
    )
    monkeypatch.setattr(sys, "executable", str(python))
    script = torchrun.on_nodes_of_job(2, 1, "2.13.0", ENVIRONMENT)(["-m", "module"])[-1]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_NODEID": "0"} | named
    output = subprocess.check_output(["bash", "-c", script], text=True, env=environment)
    assert output.startswith(f"{interface} -P -m autotune.cluster.job")
    assert "--local-addr=10.0.0.1 " in output


def test_ranks_follow_the_numbers_of_their_nodes(tmp_path):
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
        environment = os.environ | {"address": address, "SLURM_NODEID": str(node)}
        torchruns.append(
            subprocess.Popen(["bash", "-c", "exec " + " ".join(words)], env=environment)
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
    """Return a function that runs a Python line as the command of a two-node job."""
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


def test_job_script_runs_requested_commands_in_turn(job, tmp_path):
    process = job(
        "print([ask(n, f'echo said {n}; exit {n}') for n in (1, 2)]); sys.exit(9)"
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 9, output
    for nodes in (1, 2):
        assert (
            f"--nodes={nodes}\n--ntasks={nodes}\n--ntasks-per-node=1\n--nodelist=n4\n"
            in output
        )
    assert "--cpus-per-task=3\n" in output
    assert output.index("said 1") < output.index("said 2")
    assert "[1, 2]" in output
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "output", "code"),
    [(signal.SIGTERM, "code 143", 0), (signal.SIGKILL, "", 137)],
)
def test_requested_command_ends_with_its_requester(job, tmp_path, number, output, code):
    process = job(
        "print('asked', os.getpid()); print('code', ask(2, 'echo $$ > pid; exec sleep"
        " 100'))"
    )
    asker = int(process.stdout.readline().split()[1])
    deadline_s = time.monotonic() + 20
    while not (
        pid := (tmp_path / "pid").read_text() if (tmp_path / "pid").is_file() else ""
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    os.kill(asker, number)
    assert output in process.communicate(timeout=30)[0]
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
