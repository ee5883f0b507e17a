"""Where the torchruns of a job meet: an address that other nodes reach, a port that follows from the job's number."""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence

from autotune.errors import MachineLacks

_FIRST_PORT, _PORTS = 20000, 10000
"""Below those that Linux gives to outgoing connections (32768 and above)."""
_STEP = 1009
"""From one candidate to the next; a prime, so that neighbouring jobs do not run into each other's."""
CANDIDATES = 8

Addresses = Mapping[str, Sequence[str]]
"""IPv4 addresses by interface."""


def derived_ports(job: int) -> tuple[int, ...]:
    """The ports that a job may use, first choice first. Pure."""
    return tuple(_FIRST_PORT + (job + step * _STEP) % _PORTS for step in range(CANDIDATES))


def choose_port(job: int, is_free: Callable[[int], bool]) -> tuple[int, tuple[int, ...]]:
    """The first of a job's ports that is free, and those before it that are taken.

    Raises:
        MachineLacks: If none is.
    """
    ports = derived_ports(job)
    for position, port in enumerate(ports):
        if is_free(port):
            return port, ports[:position]
    raise MachineLacks(
        f"none of the ports that follow from job {job} is free here: {', '.join(map(str, ports))}",
        next_step="Submit the job again, or exclude this node: slurm.exclude in the site file.",
    )


def is_free(address: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier job's closed connections do not count
        try:
            one.bind((address, port))
        except OSError:
            return False
    return True


def own_address(interface: str | None, addresses: Addresses, of_name: Iterable[str]) -> str:
    """This node's IPv4 address, as other nodes reach it. Pure.

    Args:
        interface: The one to use; None takes what the node's name stands for, else the first that is not loopback.
        addresses: All of the node.
        of_name: What its name resolves to here; nothing where it does not.

    Raises:
        MachineLacks: If the interface is not there, or has no address.
    """
    if interface is not None:
        if not addresses.get(interface):
            having = ", ".join(name for name, listed in addresses.items() if listed)
            raise MachineLacks(
                f"the interface {interface} has no IPv4 address here; those with one: {having}",
                next_step="Correct network.interface in the site file.",
            )
        return addresses[interface][0]
    own = [one for listed in addresses.values() for one in listed]
    # Debian lets a machine's name stand for 127.0.1.1, which every node would take for itself.
    candidates = [one for one in of_name if one in own] + own
    return next((one for one in candidates if not _is_loopback(one)), "127.0.0.1")


def interface_of(address: str, addresses: Addresses) -> str:
    """Return the interface that has this address of the node. Pure."""
    return next((name for name, listed in addresses.items() if address in listed), "lo")


def read_addresses() -> dict[str, list[str]]:
    """The IPv4 addresses of this node by interface."""
    import psutil

    return {
        name: [one.address for one in listed if one.family is socket.AF_INET]
        for name, listed in psutil.net_if_addrs().items()
    }


def resolve_own_name() -> list[str]:
    """What this node's name stands for; nothing where it does not resolve."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        return list(dict.fromkeys(str(one[4][0]) for one in found))
    return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
