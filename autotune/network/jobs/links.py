"""The ``links`` job: timings of all-reduces of many sizes between ranks.

The matmul rate of each rank is measured as well.
"""

import functools
import math
import os
import re
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from autotune.cluster.torchrun import read_addresses, resolve_own_name
from autotune.evidence.network import MIB
from autotune.network.decide.link_fit import LEAST_REPEATS, lost_share, nccl_transport
from autotune.network.values import LinksRequest
from trainer.runtime.device_events import DeviceEvent, mark
from trainer.runtime.ranks import Ranks

IN_A_ROW = {"cuda": 50, "cpu": 5}
"""Messages that are timed together, so that their launch (0.1 ms on a host) is
negligible."""
PRODUCT_SIZE, PRODUCTS, PRODUCT_ROUNDS = 1024, 4, 5
SMALL_PRODUCT_SIZE, SMALL_PRODUCTS, SLOWDOWN_ROUNDS = 256, 50, 5
MOVED_BYTES = {"cuda": 512 * MIB, "cpu": 8 * MIB}
"""Size of the message that overlaps with matmuls; on a GPU, several milliseconds of
NVLink and a hundred matmuls."""
NEIGHBOUR_BYTES = {"cuda": 64 * MIB, "cpu": 4 * MIB}
NEIGHBOUR_ROUNDS = 3
MOST_PRODUCTS = 10_000
"""Limit of matmuls that are launched during one all-reduce."""
INFINIBAND = Path("/sys/class/infiniband")
_NO_LOG = "n/a (NCCL wrote no log; to get one, set NCCL_DEBUG=INFO and NCCL_DEBUG_FILE)"


def run(measured: dict[str, Any], _: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Time all-reduces, transfers between neighbours, and matmuls.

    All-reduces are over all ranks, within nodes and between them.

    Args:
        measured: A ``LinksRequest``.
        ranks: All ranks.

    Returns:
        The fields of ``LinkFigures``.
    """
    size = ranks.local_world_size
    nodes = ranks.world_size // size
    # This rank's own node, and the first ranks of all nodes; every rank must make every
    # group.
    within = [
        dist.new_group(list(range(node * size, (node + 1) * size)))
        for node in range(nodes)
    ][ranks.rank // size]
    between = dist.new_group([node * size for node in range(nodes)])
    asked = LinksRequest.of(measured)

    def times(
        group: dist.ProcessGroup | None, members: int, *, takes_part: bool
    ) -> list[tuple[int, float]]:
        return (
            _all_reduces(group, asked, ranks, takes_part=takes_part)
            if members > 1
            else []
        )

    everyone = times(None, ranks.world_size, takes_part=True)
    return {
        "all": everyone,
        # With one node, or one rank per node, these are all ranks.
        "within": everyone if nodes == 1 else times(within, size, takes_part=True),
        "between": (
            everyone
            if size == 1
            else times(between, nodes, takes_part=ranks.local_rank == 0)
        ),
        "neighbours_bytes_per_s": (
            _neighbours(ranks, nodes, asked.seconds) if nodes > 1 else []
        ),
        "matmul_flops_per_s": ranks.all_gather_float(_products(ranks)),
        "slowdown_share": _slowdown(ranks),
        "nodes": nodes,
        "ranks_per_node": size,
        **_carrier(ranks),
    }


def _all_reduces(
    group: dist.ProcessGroup | None,
    asked: LinksRequest,
    ranks: Ranks,
    *,
    takes_part: bool,
) -> list[tuple[int, float]]:
    """Return bytes and seconds of each all-reduce.

    The seconds are those of the slowest rank.
    """
    if takes_part:
        # Connects, which may take seconds.
        dist.all_reduce(torch.ones(1, device=ranks.device), group=group)
    found, repeats, limit_s = [], asked.repeats, asked.seconds
    for size in asked.sizes_bytes:
        once = functools.partial(
            dist.all_reduce, torch.zeros(size // 4, device=ranks.device), group=group
        )
        # The first call warms up; it counts only if the network is too slow for another
        # one.
        first_s = _timed(once, 1, ranks, takes_part=takes_part)
        times = (
            0
            if first_s > limit_s
            else min(repeats, max(LEAST_REPEATS, int(limit_s / max(first_s, 1e-6))))
        )
        in_a_row = _in_a_row(first_s, limit_s, repeats, ranks)
        seconds = [
            _timed(once, in_a_row, ranks, takes_part=takes_part) for _ in range(times)
        ]
        found += [(size, second) for second in seconds or [first_s]]
    return found


def _in_a_row(first_s: float, limit_s: float, repeats: int, ranks: Ranks) -> int:
    """Return the number of calls to time together; at least 1.

    All repeats end within the time limit.
    """
    return max(
        1,
        min(IN_A_ROW[ranks.device.type], int(limit_s / (repeats * max(first_s, 1e-6)))),
    )


def _timed(
    work: Callable[[], object], times: int, ranks: Ranks, *, takes_part: bool
) -> float:
    """Return the seconds of one of ``times`` consecutive calls, on the slowest rank."""
    return ranks.all_reduce_max(_own_s(work, times if takes_part else 0, ranks))[0]


def _own_s(work: Callable[[], object], times: int, ranks: Ranks) -> float:
    """Return the seconds of one of ``times`` consecutive calls on this rank's device.

    All ranks begin together.
    """
    ranks.all_reduce_sum(0.0)
    began = mark(ranks.device)
    for _ in range(times):
        work()
    ended = mark(ranks.device)
    ended.wait()
    return ended.seconds_since(began) / times if times else 0.0


def _neighbours(ranks: Ranks, nodes: int, limit_s: float) -> list[float]:
    """Return bytes per second between each node and the next, in each direction.

    One pair is measured at a time.
    """
    node, size = (
        ranks.rank // ranks.local_world_size,
        NEIGHBOUR_BYTES[ranks.device.type],
    )
    away, here = (torch.zeros(size // 4, device=ranks.device) for _ in range(2))
    found = []
    for left in range(nodes if nodes > 2 else 1):
        right = (left + 1) % nodes
        other = {left: right, right: left}.get(node) if ranks.local_rank == 0 else None

        def swap(peer: int = (other or 0) * ranks.local_world_size) -> None:
            both = [
                dist.P2POp(dist.isend, away, peer),
                dist.P2POp(dist.irecv, here, peer),
            ]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        timed = functools.partial(
            _timed, swap, ranks=ranks, takes_part=other is not None
        )
        in_a_row = _in_a_row(timed(1), limit_s, NEIGHBOUR_ROUNDS, ranks)
        found.append(size / min(timed(in_a_row) for _ in range(NEIGHBOUR_ROUNDS)))
    return found


def _multiplier(size: int, ranks: Ranks) -> tuple[Callable[[], object], int]:
    """Return a function that multiplies two matrices, and its FLOPs.

    On a GPU they are in bf16 and eight times as large.
    """
    on_gpu = ranks.device.type == "cuda"
    size *= 8 if on_gpu else 1
    options: Any = {
        "device": ranks.device,
        "dtype": torch.bfloat16 if on_gpu else torch.float32,
    }
    left, right, product = (torch.randn(size, size, **options) for _ in range(3))
    multiply = functools.partial(torch.mm, left, right, out=product)
    multiply()  # the first loads its kernel
    return multiply, 2 * size**3


def _slowdown(ranks: Ranks) -> float:
    """Return the part of their time that matmuls lose during an all-reduce.

    It is averaged over ranks.
    """
    if ranks.world_size == 1:
        return 0.0
    multiply, _ = _multiplier(SMALL_PRODUCT_SIZE, ranks)
    message = torch.zeros(MOVED_BYTES[ranks.device.type] // 4, device=ranks.device)
    dist.all_reduce(message)  # connects
    on_gpu, lost = ranks.device.type == "cuda", []
    for _ in range(SLOWDOWN_ROUNDS):
        alone_s = _own_s(multiply, SMALL_PRODUCTS, ranks)
        ranks.all_reduce_sum(0.0)
        ends = (
            _overlap_on_gpu(message, multiply, alone_s, ranks)
            if on_gpu
            else _overlap_on_host(message, multiply)
        )
        lost.append(lost_share(*ends, alone_s))
    return ranks.all_reduce_sum(statistics.median(lost))[0] / ranks.world_size


def _overlap_on_host(
    message: torch.Tensor, multiply: Callable[[], object]
) -> tuple[list[float], float]:
    """Time matmuls during an all-reduce on a CPU.

    Returns:
        The end of each matmul and the end of the all-reduce, in seconds.
    """
    began_s, ended_s = time.perf_counter(), []
    moving = dist.all_reduce(message, async_op=True)
    assert moving is not None
    while not moving.is_completed():
        multiply()
        ended_s.append(time.perf_counter() - began_s)
    moving.wait()
    return ended_s, time.perf_counter() - began_s


def _overlap_on_gpu(
    message: torch.Tensor, multiply: Callable[[], object], alone_s: float, ranks: Ranks
) -> tuple[list[float], float]:
    """Return the times of ``_overlap_on_host`` on a GPU.

    Matmuls are launched for twice the message's time alone.
    """
    alone_message_s = _timed(
        lambda: dist.all_reduce(message), 1, ranks, takes_part=True
    )
    count = min(MOST_PRODUCTS, math.ceil(2 * alone_message_s / max(alone_s, 1e-6)) + 1)
    beside = torch.cuda.Stream(ranks.device)
    ranks.all_reduce_sum(0.0)
    began = mark(ranks.device)
    moving = dist.all_reduce(message, async_op=True)
    assert moving is not None
    # Waits for the message; the matmuls' stream does not.
    with torch.cuda.stream(beside):
        moving.wait()
        there = mark(ranks.device)
    ended: list[DeviceEvent] = []
    for _ in range(count):
        multiply()
        ended.append(mark(ranks.device))
    for one in (there, ended[-1]):
        one.wait()
    return [one.seconds_since(began) for one in ended], there.seconds_since(began)


def _products(ranks: Ranks) -> float:
    """Return FLOP/s of matmuls while all ranks do the same.

    They are in bf16 on a GPU, and in fp32 on a CPU.
    """
    multiply, flops = _multiplier(PRODUCT_SIZE, ranks)
    seconds = [_own_s(multiply, PRODUCTS, ranks) for _ in range(PRODUCT_ROUNDS)]
    return flops / statistics.median(seconds[1:])


def _carrier(ranks: Ranks) -> dict[str, Any]:
    """Return ``backend``, ``transport``, ``interface`` and ``interface_bytes_per_s``.

    The first rank's are reported.
    """
    if ranks.device.type == "cuda":
        version = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        backend = f"nccl {'.'.join(map(str, version))}"
        transport, name = nccl_transport(_nccl_log()) or (
            _NO_LOG,
            os.environ.get("NCCL_SOCKET_IFNAME"),
        )
        bytes_per_s = _infiniband_bytes_per_s(name) or _ethernet_bytes_per_s(name)
    else:
        # gloo uses the interface with the address of this host's name.
        own = next(iter(resolve_own_name()), None)
        named = (
            interface for interface, listed in read_addresses().items() if own in listed
        )
        backend, transport = "gloo", "TCP sockets (gloo)"
        name = os.environ.get("GLOO_SOCKET_IFNAME") or next(named, None)
        bytes_per_s = _ethernet_bytes_per_s(name)
    return {
        "backend": backend,
        "transport": transport,
        "interface": name,
        "interface_bytes_per_s": bytes_per_s,
    }


def _nccl_log() -> str:
    """Return this process's NCCL log if ``NCCL_DEBUG_FILE`` asks for one.

    Otherwise it is empty.
    """
    pattern = os.environ.get("NCCL_DEBUG_FILE")
    if not pattern:
        return ""
    file = Path(
        pattern.replace("%h", socket.gethostname().split(".")[0]).replace(
            "%p", str(os.getpid())
        )
    )
    return file.read_text(errors="replace")[: 2**20] if file.is_file() else ""


def _ethernet_bytes_per_s(name: str | None) -> int | None:
    facts = psutil.net_if_stats().get(name or "")
    return facts.speed * 125_000 if facts is not None and facts.speed > 0 else None


def _infiniband_bytes_per_s(name: str | None) -> int | None:
    """Return the rate of the first port.

    The kernel writes it as ``100 Gb/sec (4X EDR)``.

    Returns:
        The rate in bytes per second, or None if it is unknown.
    """
    file = INFINIBAND / (name or "none") / "ports" / "1" / "rate"
    match = (
        re.match(r"\s*(\d+(?:\.\d+)?) Gb/sec", file.read_text())
        if file.is_file()
        else None
    )
    return round(float(match[1]) * 125e6) if match else None
