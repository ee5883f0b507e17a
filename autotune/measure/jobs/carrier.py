"""What carries messages between ranks, as far as this process can tell."""

import os
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from autotune.decide.links import nccl_transport
from trainer.parallel import Ranks

INFINIBAND = Path("/sys/class/infiniband")


def carrier(ranks: Ranks) -> dict[str, Any]:
    """``backend``, ``transport``, ``interface`` and ``interface_bytes_per_s``, of the first rank."""
    if ranks.device.type != "cuda":
        name = os.environ.get("GLOO_SOCKET_IFNAME") or _interface_of_name()
        return {
            "backend": "gloo",
            "transport": "TCP sockets (gloo)",
            "interface": name,
            "interface_bytes_per_s": _ethernet_bytes_per_s(name),
        }
    told = nccl_transport(_nccl_log())
    transport, name = told if told is not None else (_unknown(), os.environ.get("NCCL_SOCKET_IFNAME"))
    return {
        "backend": f"nccl {'.'.join(map(str, _nccl_version()))}",
        "transport": transport,
        "interface": name,
        "interface_bytes_per_s": _infiniband_bytes_per_s(name) or _ethernet_bytes_per_s(name),
    }


def _unknown() -> str:
    return "n/a (NCCL wrote no log, as between GPUs of one node; NCCL_DEBUG=INFO and NCCL_DEBUG_FILE ask for it)"


def _nccl_version() -> tuple[int, ...]:
    from torch.cuda import nccl

    return tuple(nccl.version()) if dist.is_nccl_available() else ()


def _nccl_log() -> str:
    """This process's log, where one was asked for."""
    pattern = os.environ.get("NCCL_DEBUG_FILE")
    if not pattern:
        return ""
    file = Path(pattern.replace("%h", socket.gethostname().split(".")[0]).replace("%p", str(os.getpid())))
    return file.read_text(errors="replace")[: 2**20] if file.is_file() else ""


def _interface_of_name() -> str | None:
    """The interface that has the address which this host's name means: gloo takes that one."""
    try:
        own = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    found = (name for name, addresses in psutil.net_if_addrs().items() if any(one.address == own for one in addresses))
    return next(found, None)


def _ethernet_bytes_per_s(name: str | None) -> int | None:
    facts = psutil.net_if_stats().get(name or "")
    return facts.speed * 125_000 if facts is not None and facts.speed > 0 else None


def _infiniband_bytes_per_s(name: str | None) -> int | None:
    """Of the first port, as the kernel says it: ``100 Gb/sec (4X EDR)``."""
    file = INFINIBAND / (name or "none") / "ports" / "1" / "rate"
    match = re.match(r"\s*(\d+(?:\.\d+)?) Gb/sec", file.read_text()) if file.is_file() else None
    return round(float(match[1]) * 125e6) if match else None
