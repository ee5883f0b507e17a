"""The ``links`` job: how long messages of many sizes take between ranks, and how fast each rank computes."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autotune.decide.links import LEAST_REPEATS
from autotune.measure.jobs.carrier import carrier
from trainer.parallel import Ranks

PRODUCT_SIZE, PRODUCTS, PRODUCT_ROUNDS = 1024, 4, 5
SMALL_PRODUCT_SIZE, SMALL_PRODUCTS, SLOWDOWN_ROUNDS = 256, 50, 5
MOVED_BYTES = 8 * 2**20
NEIGHBOUR_BYTES = 4 * 2**20


def run(measured: dict[str, Any], place: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Time all-reduces over all ranks, within nodes and between them, then neighbours and matrix products.

    Args:
        measured: ``sizes_bytes``, ``repeats`` of each, ``seconds`` after which no message of a size is begun.
        place: Nothing is needed.
        ranks: All of them.

    Returns:
        ``all``, ``within`` and ``between``: pairs of bytes and seconds of the slowest rank, empty where there is one
        member; ``neighbours_bytes_per_s``: of each node and the next, in order, from the slower of two directions;
        ``products_flops_per_s`` by rank; ``slowdown_share``, what computing loses while a message travels; ``nodes``,
        ``ranks_per_node``; what ``carrier`` says.
    """
    del place
    nodes = ranks.world_size // ranks.local_world_size
    within, between = _groups(ranks, nodes)
    sizes, repeats, limit_s = measured["sizes_bytes"], measured["repeats"], measured["seconds"]

    def times(group: dist.ProcessGroup | None, members: int, *, takes_part: bool) -> list[tuple[int, float]]:
        if members < 2:
            return []
        return _all_reduces(group, sizes, repeats, limit_s, ranks, takes_part=takes_part)

    everybody = times(None, ranks.world_size, takes_part=True)
    found = {
        "all": everybody,
        # With one node, or one rank a node, these are all ranks over again.
        "within": everybody if nodes == 1 else times(within, ranks.local_world_size, takes_part=True),
        "between": everybody
        if ranks.local_world_size == 1
        else times(between, nodes, takes_part=ranks.local_rank == 0),
    }
    return found | {
        "neighbours_bytes_per_s": _neighbours(ranks, nodes) if nodes > 1 else [],
        "products_flops_per_s": ranks.each(_products(ranks)),
        "slowdown_share": _slowdown(ranks),
        "nodes": nodes,
        "ranks_per_node": ranks.local_world_size,
        **carrier(ranks),
    }


def _groups(ranks: Ranks, nodes: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's own node, and the first ranks of all nodes; every rank must make every group."""
    size = ranks.local_world_size
    of_node = [dist.new_group(list(range(node * size, (node + 1) * size))) for node in range(nodes)]
    firsts = dist.new_group([node * size for node in range(nodes)])
    return of_node[ranks.rank // size], firsts


def _all_reduces(
    group: dist.ProcessGroup | None,
    sizes: Sequence[int],
    repeats: int,
    limit_s: float,
    ranks: Ranks,
    *,
    takes_part: bool,
) -> list[tuple[int, float]]:
    """Bytes and seconds of each all-reduce; seconds are those of the rank that waited longest."""
    if takes_part:
        dist.all_reduce(torch.ones(1, device=ranks.device), group=group)  # connects, which may take seconds
    found = []
    for size in sizes:
        tensor = torch.ones(size // 4, device=ranks.device)

        def once(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor, group=group)

        # The first warms up; where a network is so slow that there is no time for another, it has to do.
        first_s = _timed(once, ranks, takes_part=takes_part)
        times = 0 if first_s > limit_s else min(repeats, max(LEAST_REPEATS, int(limit_s / max(first_s, 1e-6))))
        seconds = [_timed(once, ranks, takes_part=takes_part) for _ in range(times)]
        found += [(size, second) for second in seconds or [first_s]]
    return found


def _timed(work: Callable[[], None], ranks: Ranks, *, takes_part: bool) -> float:
    """Seconds that the slowest rank took, all having begun together."""
    ranks.sum(0.0)
    began_s = time.perf_counter()
    if takes_part:
        work()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
    return ranks.max(time.perf_counter() - began_s if takes_part else 0.0)[0]


def _neighbours(ranks: Ranks, nodes: int) -> list[float]:
    """Bytes per second from each node to the next and back, one pair at a time."""
    first = ranks.local_rank == 0
    node = ranks.rank // ranks.local_world_size
    found = []
    for left in range(nodes if nodes > 2 else 1):
        right = (left + 1) % nodes
        other = {left: right, right: left}.get(node) if first else None
        swap = functools.partial(_swap, ranks, other)
        seconds = [_timed(swap, ranks, takes_part=other is not None) for _ in range(3)]
        found.append(NEIGHBOUR_BYTES / min(seconds))
    return found


def _swap(ranks: Ranks, node: int | None) -> None:
    """Send to the first rank of another node and receive from it at once."""
    assert node is not None
    away = torch.ones(NEIGHBOUR_BYTES // 4, device=ranks.device)
    here = torch.empty_like(away)
    other = node * ranks.local_world_size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, away, other), dist.P2POp(dist.irecv, here, other)]):
        work.wait()


def _slowdown(ranks: Ranks) -> float:
    """Which part of their time ranks lose to moving a message, when they multiply matrices meanwhile; their mean."""
    if ranks.world_size == 1:
        return 0.0
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    size = 8 * SMALL_PRODUCT_SIZE if ranks.device.type == "cuda" else SMALL_PRODUCT_SIZE
    left, right = (torch.randn(size, size, device=ranks.device, dtype=dtype) for _ in range(2))
    message = torch.ones(MOVED_BYTES // 4, device=ranks.device)

    def product() -> None:
        left @ right
        if ranks.device.type == "cuda":
            torch.cuda.current_stream(ranks.device).synchronize()

    product()
    alone_s, lost = [], []
    for _ in range(SLOWDOWN_ROUNDS):
        ranks.sum(0.0)
        began_s = time.perf_counter()
        for _ in range(SMALL_PRODUCTS):
            product()
        alone_s.append((time.perf_counter() - began_s) / SMALL_PRODUCTS)
        ranks.sum(0.0)
        began_s, done = time.perf_counter(), 0
        moving = dist.all_reduce(message, async_op=True)
        assert moving is not None
        while not moving.is_completed():
            product()
            done += 1
        moving.wait()
        took_s = time.perf_counter() - began_s
        lost.append(1 - done * alone_s[-1] / took_s)
    return ranks.sum(min(1.0, max(0.0, statistics.median(lost))))[0] / ranks.world_size


def _products(ranks: Ranks) -> float:
    """FLOP/s of matrix products in bf16 on a GPU, in fp32 on a CPU, while all ranks do the same."""
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    size = 8 * PRODUCT_SIZE if ranks.device.type == "cuda" else PRODUCT_SIZE
    left, right = (torch.randn(size, size, device=ranks.device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(PRODUCT_ROUNDS):
        ranks.sum(0.0)
        began_s = time.perf_counter()
        for _ in range(PRODUCTS):
            left @ right
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - began_s)
    return 2 * size**3 * PRODUCTS / statistics.median(seconds[1:])
