"""Several hosts on one machine: network namespaces on a bridge.

Each is behind a link of a given speed. This requires root.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import MachineLacks
from autotune.trials.multirank import MultirankMachine

PORT = 29_511

BURST_BYTES = 128 * 1024
"""Of the token bucket: what may leave at once. Too little, and a busy host that wakes
late never reaches the rate."""
LATENCY_MS = 200
"""That a packet may queue before it is dropped; long, as nothing else shares the
link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One namespace."""

    name: str
    address: str
    interface: str = "eth0"

    def command(self, *words: str) -> list[str]:
        """Return a command that runs on the host, and ends with its parent."""
        return [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "ip",
            "netns",
            "exec",
            self.name,
            *words,
        ]


def check_namespaces() -> None:
    """Check that namespaces can be made here.

    Raises:
        MachineLacks: If they cannot.
    """
    if os.geteuid() != 0:
        raise MachineLacks(
            "network namespaces need root", next_step="Run this as root."
        )
    for command, package in (
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("setpriv", "util-linux"),
    ):
        if shutil.which(command) is None:
            raise MachineLacks(
                f"{command} is not here",
                next_step=f"Install it: apt-get install {package}",
            )


@contextlib.contextmanager
def hosts(
    count: int,
    bits_per_s: int,
    *,
    name: str = "lab",
    slow: dict[int, int] | None = None,
) -> Iterator[list[Host]]:
    """Make hosts that send and receive at a rate; they are removed at the end.

    Args:
        count: Number of hosts.
        bits_per_s: Rate of each link, in each direction.
        name: Beginning of the names of namespaces and of the bridge.
        slow: Other rates, by a host's number.
    """
    check_namespaces()
    bridge = f"{name}br"
    lab = [
        Host(name=f"{name}{number}", address=f"10.213.0.{number + 1}")
        for number in range(count)
    ]
    _remove(lab, bridge)
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, host in enumerate(lab):
            _connect(host, bridge, (slow or {}).get(number, bits_per_s))
        yield lab
    finally:
        _remove(lab, bridge)


def together(lab: Sequence[Host], scratch: Path) -> MultirankMachine:
    """Return a machine of a torchrun on each host, which meet at the first host."""
    processors = sorted(os.sched_getaffinity(0))

    def start(arguments: Sequence[str]) -> list[str]:
        commands = [
            shlex.join(
                host.command(
                    # Hosts have processors of their own: unless they are told which,
                    # all would use all.
                    "taskset",
                    "--cpu-list",
                    str(processors[number % len(processors)]),
                    "env",
                    f"GLOO_SOCKET_IFNAME={host.interface}",
                    "OMP_NUM_THREADS=1",
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    f"--nnodes={len(lab)}",
                    f"--node-rank={number}",
                    f"--master-addr={lab[0].address}",
                    f"--master-port={PORT}",
                    "--nproc-per-node=1",
                    "--max-restarts=0",
                    *arguments,
                )
            )
            for number, host in enumerate(lab)
        ]
        return ["bash", "-c", " & ".join(commands) + " & wait"]

    return MultirankMachine(start, "cpu", scratch)


def _connect(host: Host, bridge: str, bits_per_s: int) -> None:
    outer = f"{host.name}v"
    _ip("netns", "add", host.name)
    _ip(
        "link",
        "add",
        outer,
        "type",
        "veth",
        "peer",
        "name",
        host.interface,
        "netns",
        host.name,
    )
    _ip("link", "set", outer, "master", bridge, "up")
    inside = host.command("ip")
    _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _run(*inside, "link", "set", host.interface, "up")
    _run(*inside, "link", "set", "lo", "up")
    shape = [
        "root",
        "tbf",
        "rate",
        f"{bits_per_s}bit",
        "burst",
        str(BURST_BYTES),
        "latency",
        f"{LATENCY_MS}ms",
    ]
    # What it sends.
    _run(*host.command("tc"), "qdisc", "add", "dev", host.interface, *shape)
    _run("tc", "qdisc", "add", "dev", outer, *shape)  # what it receives


def _remove(lab: list[Host], bridge: str) -> None:
    for host in lab:
        subprocess.run(
            ["ip", "netns", "del", host.name], capture_output=True, check=False
        )
        subprocess.run(
            ["ip", "link", "del", f"{host.name}v"], capture_output=True, check=False
        )
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    if process.returncode:
        raise MachineLacks(
            f"{' '.join(words)}: {process.stderr.strip()}",
            next_step=(
                "Network namespaces, veth and tc tbf must be allowed: not in most"
                " containers."
            ),
        )
