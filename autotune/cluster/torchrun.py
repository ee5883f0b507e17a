"""Commands that start ranks on this node or on several.

They use torchrun with its rendezvous, and ``srun``. ``on_this_node`` and
``on_nodes_of_job`` return functions that make such commands; ``run_child`` runs one.
The rest finds the address and port at which nodes meet.
"""

import contextlib
import ipaddress
import itertools
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
"""Version of torch from which torchrun has ``--shutdown-timeout``."""
_FIRST_PORT = 20000
"""First port of the range that jobs use."""
_PORTS = 10000
"""Ports in that range, which is below those of outgoing connections in Linux (32768 and
above)."""
_PORT_STEP = 1009
"""Distance between candidate ports; a prime, so that neighbouring jobs do not choose
each other's."""
CANDIDATES = 8
"""Number of candidate ports of a job."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the network interface, in order of preference."""
STARTER_VARIABLE = "AUTOTUNE_STARTER"
"""Environment variable with the directory of ``start_outside``, if the job's script
starts programs."""
_POLL_S = 0.1
"""Time between two looks for an answer, in seconds."""
_FORWARDED_SIGNALS = (
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
    named = [environment[name] for name in INTERFACE_VARIABLES if environment.get(name)]
    interface = named[0] if named else None
    job = environment["SLURM_JOB_ID"]

    def command(arguments: Sequence[str]) -> list[str]:
        address = own_address(interface, read_addresses(), resolve_own_name())
        port, _ = choose_port(int(job), lambda port: is_free(address, port))
        torchrun = torchrun_command(
            sys.executable,
            arguments,
            ranks=ranks,
            torch_version=torch_version,
            meeting=(nodes, f"{address}:{port}", job),
        )
        script = _node_script(torchrun, interface)
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
        this_node = environment.get("SLURMD_NODENAME")
        # In a larger job SLURM may choose other nodes than the first ones for a step.
        node_list = [f"--nodelist={this_node}"] if this_node else []
        return [
            "srun",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            *node_list,
            f"--cpus-per-task={environment.get('SLURM_CPUS_PER_TASK', '1')}",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            "bash",
            "-c",
            script,
        ]

    return command


def _node_script(torchrun: Sequence[str], interface: str | None) -> str:
    """Return the bash script that each node runs.

    Args:
        torchrun: Command of torchrun; its words with a ``$`` are expanded on the node.
        interface: Network interface; None for that of the node's name.
    """
    python = shlex.quote(sys.executable)
    address_command = f"{python} -P -m autotune job address"
    if interface is not None:
        address_command += f" --interface {shlex.quote(interface)}"
    words = [word if "$" in word else shlex.quote(word) for word in torchrun]
    # Without GLOO_SOCKET_IFNAME, gloo resolves the node's name, which may give an
    # address that other nodes cannot reach.
    lines = [
        f"own=$({address_command}) || exit",
        'read -r address interface <<< "$own"',
        'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"',
        f"exec {' '.join(words)}",
    ]
    return "\n".join(lines)


def start_outside(directory: Path, nodes: int, script: str) -> int:
    """Let the job's script, outside the container, run a bash script on these nodes.

    SIGTERM is forwarded.

    In ``directory``, ``N.sh`` is the script for each node and ``N.nodes`` their number;
    the job's script answers with ``N.log``, which is written to standard output, and
    finally ``N.code``, the exit code of ``srun``. ``N.end`` asks it to stop. Scripts
    run one after the other, so the highest number is the running one.
    """
    number = 1 + len(list(directory.glob("*.nodes")))
    request = directory / str(number)
    signal.signal(signal.SIGTERM, lambda *_: request.with_suffix(".end").touch())
    request.with_suffix(".sh").write_text(script + "\n")
    write_atomically(request.with_suffix(".nodes"), f"{nodes}\n", durable=False)
    exit_code = request.with_suffix(".code")
    while not exit_code.is_file():
        time.sleep(_POLL_S)
    log = request.with_suffix(".log")
    if log.is_file():
        sys.stdout.write(log.read_text(errors="replace"))
    return int(exit_code.read_text())


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command and return its exit code.

    The command gets this process's signals and ends with it. Ranks save first.
    """
    # A terminal sends Ctrl-C to the whole foreground group; in a separate session the
    # forwarded signal arrives once.
    child = start_child(command, env=dict(environment), start_new_session=True)

    def forward(number: int, _: object) -> None:
        child.send_signal(_FOR_TORCHRUN.get(signal.Signals(number), number))

    earlier_handlers = {
        number: signal.signal(number, forward) for number in _FORWARDED_SIGNALS
    }
    try:
        return child.wait()
    finally:
        for number, handler in earlier_handlers.items():
            signal.signal(number, handler)


def derived_ports(job: int) -> tuple[int, ...]:
    """Return the ports that a job may use, in order of preference. Pure."""
    return tuple(
        _FIRST_PORT + (job + number * _PORT_STEP) % _PORTS
        for number in range(CANDIDATES)
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
    raise MachineLacks(
        f"no free port for job {job} here: {', '.join(map(str, ports))} are taken",
        next_step=(
            "Submit the job again, or exclude this node: slurm.exclude in the site"
            " file."
        ),
    )


def is_free(address: str, port: int) -> bool:
    """Return True if nothing listens on the port."""
    with socket.socket() as listener:
        # An earlier job's closed connections do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError:
            return False
    return True


def own_address(
    interface: str | None, addresses: Addresses, resolved: Iterable[str]
) -> str:
    """Return the IPv4 address by which other nodes reach this node. Pure.

    It is not loopback, unless the node has no other address.

    Args:
        interface: Interface whose address to return; None for an address to which the
            node's name resolves, or else the first one.
        addresses: Addresses of this node.
        resolved: Addresses to which the node's name resolves.

    Raises:
        MachineLacks: If the interface does not exist, or has no address.
    """
    if interface is not None:
        if not addresses.get(interface):
            connected = ", ".join(name for name, listed in addresses.items() if listed)
            raise MachineLacks(
                f"network interface {interface!r} has no IPv4 address here; interfaces"
                f" with one: {connected}",
                next_step="Correct network.interface in the site file.",
            )
        return addresses[interface][0]
    own = list(itertools.chain.from_iterable(addresses.values()))
    candidates = [address for address in resolved if address in own] + own
    for address in candidates:
        # Debian resolves a machine's name to 127.0.1.1, which is a different machine on
        # every node.
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return "127.0.0.1"


def interface_of(address: str, addresses: Addresses) -> str:
    """Return the interface that has this address of the node, else ``lo``. Pure."""
    for name, listed in addresses.items():
        if address in listed:
            return name
    return "lo"


def read_addresses() -> dict[str, list[str]]:
    """Return this node's IPv4 addresses by interface."""
    import psutil

    addresses = {}
    for name, listed in psutil.net_if_addrs().items():
        addresses[name] = [
            entry.address for entry in listed if entry.family is socket.AF_INET
        ]
    return addresses


def resolve_own_name() -> list[str]:
    """Return the addresses to which this node's name resolves; none if it does not."""
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        addresses = [str(socket_address[0]) for *_, socket_address in entries]
        return list(dict.fromkeys(addresses))
    return []
