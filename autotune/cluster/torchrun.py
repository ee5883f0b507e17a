"""The command line of torchrun, on one node alone or on each of several. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

Version = tuple[int, int]

_SHUTDOWN_TIMEOUT_SINCE: Version = (2, 13)
DEFAULT_SHUTDOWN_S = 30
"""How long torchrun waits for its ranks after a signal, where it cannot be told."""
_STORE_TIMEOUT_S = 600
"""How long a node waits for the one that keeps the store: as long as for all others, and as where nodes are numbered.
Without it, 60 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the torchruns of several nodes find each other.

    Each text stands in the command line as it is: a literal value, or a shell's variable for it.
    """

    nodes: int
    endpoint: str
    """``address:port``."""
    job: str
    """Tells this meeting from others at the same place."""
    address: str
    """Of this node, as the others reach it: its name may mean nothing to them."""
    is_host: str | None = None
    """1 on the node that keeps the meeting's store, 0 on the others; nodes are numbered by the text of their
    addresses."""
    node_rank: str | None = None
    """Number of this node, instead: 0 keeps the store, and has the first ranks."""


def torchrun_command(
    python: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    torch_version: str,
    meeting: Meeting | None = None,
    shutdown_s: int | None = None,
) -> tuple[str, ...]:
    """One node's torchrun; what is started again is the whole job, so it restarts nothing by itself.

    Args:
        python: The interpreter.
        arguments: What each rank runs, such as ``-m trainer …``.
        ranks: Of this node.
        torch_version: The installed one: older ones lack some options.
        meeting: None for one node alone.
        shutdown_s: How long ranks have to save and leave after a signal.
    """
    words = [python, "-m", "torch.distributed.run"]
    if meeting is None:
        words.append("--standalone")
    else:
        words += [f"--nnodes={meeting.nodes}", *_rendezvous(meeting)]
        words += [f"--rdzv-id={meeting.job}", f"--local-addr={meeting.address}"]
    words += [f"--nproc-per-node={ranks}", "--max-restarts=0"]
    if shutdown_s is not None and version_of(torch_version) >= _SHUTDOWN_TIMEOUT_SINCE:
        words.append(f"--shutdown-timeout={shutdown_s}")
    return (*words, *arguments)


def _rendezvous(meeting: Meeting) -> list[str]:
    if meeting.node_rank is None:
        told = f"is_host={meeting.is_host},read_timeout={_STORE_TIMEOUT_S}"
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint={meeting.endpoint}", f"--rdzv-conf={told}"]
    address, _, port = meeting.endpoint.rpartition(":")
    return [
        "--rdzv-backend=static",
        f"--master-addr={address}",
        f"--master-port={port}",
        f"--node-rank={meeting.node_rank}",
    ]


def version_of(text: str) -> Version:
    """The first two numbers of a version; (0, 0) where there are none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
