"""Commands that start ranks on this node or on several.

They use torchrun with its rendezvous, and ``srun``.
"""

import contextlib
import ipaddress
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from autotune.base.process import start_child
from autotune.errors import MachineLacks
from trainer.formats.files import write_atomically

Start = Callable[[Sequence[str]], list[str]]
"""Function from the arguments that ranks run, such as ``-m module …``, to the command
that starts them on all nodes."""
Addresses = Mapping[str, Sequence[str]]
"""IPv4 addresses by interface."""
Meeting = tuple[int, str, str]
"""Rendezvous of the torchruns of several nodes: number of nodes, ``address:port`` of
the first, and a name."""

_SHUTDOWN_TIMEOUT_SINCE = (2, 13)
_FIRST_PORT, _PORTS = 20000, 10000
"""First candidate port and their range, below the ports of outgoing connections in
Linux (32768 and above)."""
_STEP = 1009
"""Distance between candidate ports; a prime, so that neighbouring jobs do not choose
each other's."""
CANDIDATES = 8
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
STARTER_VARIABLE = "AUTOTUNE_STARTER"
_POLL_S = 0.1
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FOR_TORCHRUN = {signal.SIGUSR1: signal.SIGTERM, signal.SIGUSR2: signal.SIGTERM}
"""Signals sent to torchrun instead, which forwards fewer than the trainer handles;
others would kill it."""


def torchrun_command(
    python: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    torch_version: str,
    meeting: Meeting | None = None,
    shutdown_s: int | None = None,
) -> list[str]:
    """Return one node's torchrun command. Pure.

    It restarts nothing, as only the whole job restarts.

    Args:
        python: Interpreter.
        arguments: Command of each rank, such as ``-m trainer …``.
        ranks: Ranks of the node.
        torch_version: Version of torch.
        meeting: Rendezvous of several nodes; None for a single node. A shell fills in
            the node's number (0 holds the rendezvous store) and its address, as others
            may not resolve its name.
        shutdown_s: Time of each rank to save and exit after a signal. Torch before 2.13
            has no such option.
    """
    # -P: a trainer.py in the working directory must not replace the trainer. torchrun
    # has no way to pass it to the Python that it starts for each rank.
    words = [python, "-P", "-m", "autotune.cluster.job"]
    if meeting is None:
        words.append("--standalone")
    else:
        nodes, endpoint, name = meeting
        words += [
            f"--nnodes={nodes}",
            "--node-rank=$SLURM_NODEID",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={name}",
            "--local-addr=$address",
        ]
    words += [f"--nproc-per-node={ranks}", "--max-restarts=0"]
    version = tuple(map(int, re.findall(r"\d+", torch_version)[:2]))
    if shutdown_s is not None and version >= _SHUTDOWN_TIMEOUT_SINCE:
        words.append(f"--shutdown-timeout={shutdown_s}")
    return [*words, "--no-python", python, "-u", "-P", *arguments]


def on_this_node(ranks: int, torch_version: str) -> Start:
    """Return a function that makes the command of one torchrun with this many ranks."""
    return lambda arguments: torchrun_command(
        sys.executable, arguments, ranks=ranks, torch_version=torch_version
    )


def on_nodes_of_job(
    nodes: int,
    ranks: int,
    torch_version: str,
    environment: Mapping[str, str] = os.environ,
) -> Start:
    """Return a function that makes the command for all of the job's first nodes.

    It is one ``srun`` on the first node, which starts a torchrun on each. The nodes
    have this many ranks each and are numbered from this node on: rank 0 is here. If the
    job's script starts programs (``start_outside``), the command asks it to.
    """
    interface = next(
        (environment[name] for name in INTERFACE_VARIABLES if environment.get(name)),
        None,
    )
    option = "" if interface is None else f" --interface {shlex.quote(interface)}"
    job = environment["SLURM_JOB_ID"]

    def command(arguments: Sequence[str]) -> list[str]:
        here = own_address(interface, read_addresses(), resolve_own_name())
        port, _ = choose_port(int(job), lambda port: is_free(here, port))
        meeting = nodes, f"{here}:{port}", job
        words = torchrun_command(
            sys.executable,
            arguments,
            ranks=ranks,
            torch_version=torch_version,
            meeting=meeting,
        )
        asking = f"{shlex.quote(sys.executable)} -P -m autotune job address{option}"
        # Otherwise gloo resolves the node's name, which may give an address that other
        # nodes cannot reach.
        own = (
            f'own=$({asking}) || exit\nread -r address interface <<< "$own"\n'
            'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"\nexec '
        )
        # Words with a $ are expanded on the node.
        script = own + " ".join(
            word if "$" in word else shlex.quote(word) for word in words
        )
        if environment.get(STARTER_VARIABLE):
            return [
                sys.executable,
                "-P",
                "-m",
                "autotune",
                "job",
                "outside",
                f"--nodes={nodes}",
                f"--script={script}",
            ]
        # In a larger job SLURM may choose other nodes than the first ones for a step.
        with_this_one = (
            [f"--nodelist={name}"]
            if (name := environment.get("SLURMD_NODENAME"))
            else []
        )
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            *with_this_one,
            f"--cpus-per-task={environment.get('SLURM_CPUS_PER_TASK', '1')}",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            "bash",
            "-c",
            script,
        ]

    return command


def start_outside(directory: Path, nodes: int, script: str) -> int:
    """Let the job's script, outside the container, run a bash script on these nodes.

    SIGTERM is forwarded.

    In ``directory``, ``N.sh`` is the script for each node and ``N.nodes`` their number;
    the job's script answers with ``N.log``, which is written to standard output, and
    finally ``N.code``, the exit code of ``srun``. ``N.end`` asks it to stop. Scripts
    run one after the other, so the highest number is the running one.
    """
    asked = directory / str(1 + len(list(directory.glob("*.nodes"))))
    signal.signal(signal.SIGTERM, lambda *_: asked.with_suffix(".end").touch())
    asked.with_suffix(".sh").write_text(script + "\n")
    write_atomically(asked.with_suffix(".nodes"), f"{nodes}\n", durable=False)
    answer = asked.with_suffix(".code")
    while not answer.is_file():
        time.sleep(_POLL_S)
    log = asked.with_suffix(".log")
    if log.is_file():
        sys.stdout.write(log.read_text(errors="replace"))
    return int(answer.read_text())


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its exit code.

    The command gets this process's signals and ends with it. Ranks save first.
    """
    # A terminal sends Ctrl-C to the whole foreground group; in a separate session the
    # forwarded signal arrives once.
    child = start_child(command, env=dict(environment), start_new_session=True)

    def pass_on(number: int, _: object) -> None:
        child.send_signal(_FOR_TORCHRUN.get(signal.Signals(number), number))

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def derived_ports(job: int) -> tuple[int, ...]:
    """Return the ports that a job may use, in order of preference. Pure."""
    return tuple(
        _FIRST_PORT + (job + step * _STEP) % _PORTS for step in range(CANDIDATES)
    )


def choose_port(
    job: int, is_free: Callable[[int], bool]
) -> tuple[int, tuple[int, ...]]:
    """Return a job's first free port, and the taken ones before it.

    Raises:
        MachineLacks: If no port is free.
    """
    ports = derived_ports(job)
    for position, port in enumerate(ports):
        if is_free(port):
            return port, ports[:position]
    what = f"no free port for job {job} here: {', '.join(map(str, ports))} are taken"
    raise MachineLacks(
        what,
        next_step=(
            "Submit the job again, or exclude this node: slurm.exclude in the site"
            " file."
        ),
    )


def is_free(address: str, port: int) -> bool:
    """Return True if nothing listens on the port."""
    with socket.socket() as one:
        # An earlier job's closed connections do not count.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((address, port))
        except OSError:
            return False
    return True


def own_address(
    interface: str | None, addresses: Addresses, of_name: Iterable[str]
) -> str:
    """Return the IPv4 address by which other nodes reach this node. Pure.

    Without ``interface``, it is an address to which the node's name resolves
    (``of_name``), or else the first address. It is never loopback.

    Raises:
        MachineLacks: If the interface does not exist, or has no address.
    """
    if interface is not None:
        if not addresses.get(interface):
            having = ", ".join(name for name, listed in addresses.items() if listed)
            what = (
                f"network interface {interface!r} has no IPv4 address here; interfaces"
                f" with one: {having}"
            )
            raise MachineLacks(
                what, next_step="Correct network.interface in the site file."
            )
        return addresses[interface][0]
    own = [one for listed in addresses.values() for one in listed]
    # Debian resolves a machine's name to 127.0.1.1, which is a different machine on
    # every node.
    candidates = [one for one in of_name if one in own] + own
    return next(
        (one for one in candidates if not ipaddress.ip_address(one).is_loopback),
        "127.0.0.1",
    )


def interface_of(address: str, addresses: Addresses) -> str:
    """Return the interface that has this address of the node, else ``lo``. Pure."""
    return next((name for name, listed in addresses.items() if address in listed), "lo")


def read_addresses() -> dict[str, list[str]]:
    """Return this node's IPv4 addresses by interface."""
    import psutil

    return {
        name: [one.address for one in listed if one.family is socket.AF_INET]
        for name, listed in psutil.net_if_addrs().items()
    }


def resolve_own_name() -> list[str]:
    """Return the addresses to which this node's name resolves; none if it does not."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        return list(dict.fromkeys(str(one[4][0]) for one in found))
    return []
