"""Model of the time of an optimizer step with gradient synchronisation.

It follows from measured links and ranks.

Sources: ring all-reduce and its (k - 1)/k, Patarasuk and Yuan 2009; latency and
bandwidth, Hockney 1994; buckets, their order and overlap, Li et al. 2020 (PyTorch
Distributed), sections 3 and 4.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.evidence.network import (
    MIB,
    ComputeEvidence,
    GradientPart,
    GradientSync,
    Link,
    Network,
    RankCompute,
)
from autotune.trials.job_figures import GradientSyncFigures

FIRST_BUCKET_BYTES, DEFAULT_CAP_BYTES = MIB, 25 * MIB
"""Sizes of DDP's first bucket, small so that transfers start early, and of the others
by default (torch 2.13, nn/parallel/distributed.py); if another size is asked for, the
first bucket has it too."""
FP32_BYTES = 4
LEAST_PART_ELEMENTS = 2**17
"""Gradients with fewer elements are merged with the next; DDP's smallest bucket has 2¹⁸
in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step by cause; all but ``sync_s`` add up to the step."""

    compute_s: float
    """Forward and backward of an undisturbed rank."""
    straggling_s: float
    """Wait for the slowest rank of every step."""
    slowdown_s: float
    """Slowdown of compute by transfers of gradients at the same time."""
    exposed_s: float
    """Wait for gradients or weights that does not overlap with compute."""
    optimizer_step_s: float
    sync_s: float
    """Total time of transfers, overlapped or not; not part of the sum."""

    @property
    def step_s(self) -> float:
        """Total time of the step."""
        return (
            self.compute_s
            + self.straggling_s
            + self.slowdown_s
            + self.exposed_s
            + self.optimizer_step_s
        )


def all_reduce_s(size_bytes: float, network: Network) -> float:
    """Return the time of an all-reduce over all ranks.

    It reduces and gathers within nodes, with a ring or tree between them. The ring
    sends 2(k - 1)/k of the bytes over each node's NIC in 2(k - 1) hops, the tree all of
    them twice in 2⌈log₂ k⌉. The measured factor corrects this for several ranks per
    node.
    """
    within = (
        0.0
        if network.within is None
        else _ring_s(size_bytes, network.ranks_per_node, network.within)
    )
    if network.nodes == 1:
        return within
    between = network.between
    ways = [_ring_s(size_bytes, network.nodes, between)]
    if network.trees:
        ways.append(
            tree_hops(network.nodes) * between.latency_s
            + 2 * size_bytes / between.bytes_per_s
        )
    factor = network.all_reduce_factor if network.ranks_per_node > 1 else 1.0
    return factor * (within + min(ways))


def tree_hops(members: int) -> int:
    """Return the hops of a message up and down a tree."""
    return 2 * math.ceil(math.log2(members))


def all_reduce_factor(times: Sequence[tuple[float, float]], network: Network) -> float:
    """Return the measured over the predicted time of all-reduces over all ranks.

    It is 1 if it is unknown.
    """
    if network.nodes == 1 or network.ranks_per_node == 1:
        return 1.0
    plain = replace(network, all_reduce_factor=1.0)
    # Latency dominates small ones.
    ratios = [
        seconds / all_reduce_s(size, plain) for size, seconds in times if size >= MIB
    ]
    return statistics.median(ratios) if ratios else 1.0


def _ring_s(size_bytes: float, members: int, link: Link) -> float:
    return (
        2 * (members - 1) * (link.latency_s + size_bytes / members / link.bytes_per_s)
    )


def gather_s(size_bytes: float, network: Network) -> float:
    """Return the time of an all-gather, or reduce-scatter, of ``size_bytes``.

    It is half of an all-reduce's.
    """
    return all_reduce_s(size_bytes, network) / 2


@functools.lru_cache(maxsize=64)  # a few, shared by hundreds of numbers of nodes
def buckets(
    gradients: tuple[GradientPart, ...], cap_bytes: int
) -> tuple[GradientPart, ...]:
    """Return DDP's buckets in order of readiness.

    Each is closed by the gradient that fills it.
    """
    first = FIRST_BUCKET_BYTES if cap_bytes == DEFAULT_CAP_BYTES else cap_bytes
    return merged(gradients, first // FP32_BYTES, cap_bytes // FP32_BYTES)


def merged(
    gradients: Sequence[GradientPart], first: int, later: int
) -> tuple[GradientPart, ...]:
    """Merge small gradients into the next.

    The first part has at least ``first`` elements, the others ``later``.
    """
    found: list[GradientPart] = []
    elements = 0
    for part in gradients:
        elements += part.elements
        if elements >= (later if found else first) or part is gradients[-1]:
            found.append(replace(part, elements=elements))
            elements = 0
    return tuple(found)


def compute_of(whole: GradientSyncFigures, fixed_s: float) -> ComputeEvidence:
    """Return the compute of a rank.

    It is from steps of one micro-batch without synchronisation.
    """
    ranks = len(whole.compute_s_by_rank)
    # The spread of a rank's own steps; a rank that is always slower is not jitter.
    deviations = [
        statistics.pstdev(steps) / statistics.fmean(steps)
        for steps in whole.compute_s_by_rank
    ]
    jitter_share = statistics.median(deviations) if ranks > 1 else 0.0
    # The measured steps include the wait for the slowest rank.
    alone = 1 / (1 + jitter_share * expected_largest(ranks)) if ranks else 1.0
    gradients = [
        GradientPart(elements=elements, ready_share=ready)
        for elements, ready in whole.gradients
    ]
    # To keep profiles short.
    parts = merged(gradients, LEAST_PART_ELEMENTS, LEAST_PART_ELEMENTS)
    return ComputeEvidence(
        micro_batch_size=whole.micro_batch_size,
        micro_batch_s=alone * computed_s(whole),
        fixed_s=alone * fixed_s,
        optimizer_step_s=whole.optimizer_step_s,
        forward_share=whole.forward_share or 1 / 3,
        jitter_share=jitter_share,
        slowdown_share=0.0,
        gradient_elements=[part.elements for part in parts],
        gradient_ready_shares=[part.ready_share for part in parts],
    )


def computed_s(figures: GradientSyncFigures) -> float:
    """Return seconds of forward and backward without synchronisation.

    The wait for the slowest rank is included.
    """
    return max(1e-9, statistics.median(figures.step_s) - figures.optimizer_step_s)


def step_time(
    compute: RankCompute,
    rows: float,
    micro_batches: int,
    sync: GradientSync,
    network: Network,
) -> StepTime:
    """Return the time of an optimizer step of several micro-batches on every rank.

    Each micro-batch has ``rows`` sequences. DDP's and ZeRO-1's all-reduce overlaps with
    the last micro-batch's backward only; FSDP2 gathers weights in each.
    """
    alone = compute.forward_backward_s(rows)
    # Ranks wait for each other once per step, after all micro-batches.
    late = (
        compute.jitter_share
        * alone
        * math.sqrt(micro_batches)
        * expected_largest(network.ranks)
    )
    if network.ranks == 1:
        exposed = slowdown = transfer_s = 0.0
    elif sync.strategy == "fsdp2":
        exposed, slowdown, transfer_s = _sharded(
            compute, alone, micro_batches, sync, network
        )
    else:
        exposed, slowdown, transfer_s = _bucketed(compute, alone, sync, network)
    shards = network.ranks_per_node if sync.shard_within_nodes else network.ranks
    if sync.strategy == "zero1":
        # Updated weights are gathered without overlap.
        weights = gather_s(compute.elements * FP32_BYTES, network)
        exposed, transfer_s = exposed + weights, transfer_s + weights
    update = compute.optimizer_step_s / (1 if sync.strategy == "ddp" else shards)
    parts = {
        "straggling_s": late,
        "slowdown_s": slowdown,
        "exposed_s": exposed,
        "optimizer_step_s": update,
    }
    return StepTime(compute_s=micro_batches * alone, **parts, sync_s=transfer_s)


def _bucketed(
    compute: RankCompute, alone: float, sync: GradientSync, network: Network
) -> tuple[float, float, float]:
    """Return DDP's seconds of exposed wait, slowdown and transfers.

    All of them are of the last micro-batch.
    """
    backward = alone * (1 - compute.forward_share)
    free = delayed = transfer_s = 0.0  # from the beginning of backward on
    for bucket in buckets(compute.gradients, sync.bucket_cap_bytes):
        starts = max(free, bucket.ready_share * backward + delayed)
        took = all_reduce_s(bucket.elements * sync.element_bytes, network)
        # Only transfers before the end of backward slow it down.
        delayed += compute.slowdown_share * max(
            0.0, min(starts + took, backward + delayed) - starts
        )
        free = starts + took
        transfer_s += took
    return max(0.0, free - backward - delayed), delayed, transfer_s


def _sharded(
    compute: RankCompute,
    alone: float,
    micro_batches: int,
    sync: GradientSync,
    network: Network,
) -> tuple[float, float, float]:
    """Return FSDP2's seconds as ``_bucketed``.

    Weights are gathered in each pass, and gradients are sent after the last. The
    transfers of the first layer's weights and the last gradient, which do not overlap,
    are neglected.
    """
    within = sync.shard_within_nodes
    gather = gather_s(
        compute.elements * FP32_BYTES, replace(network, nodes=1) if within else network
    )
    send = (all_reduce_s if within else gather_s)(
        compute.elements * sync.element_bytes, network
    )
    forward = alone * compute.forward_share
    backward = alone - forward
    transfer_s = micro_batches * 2 * gather + send
    exposed = micro_batches * max(0.0, gather - forward) + max(
        0.0, gather + send - backward
    )
    exposed += (micro_batches - 1) * max(0.0, gather - backward)
    return exposed, compute.slowdown_share * (transfer_s - exposed), transfer_s


@functools.lru_cache
def expected_largest(ranks: int) -> float:
    """Return the expected largest of ``ranks`` normal values.

    It is in standard deviations above the mean: the integral of 1 - Φⁿ above 0, less
    that of Φⁿ below, by trapezoids. Known approximations are 4 % off for two.
    """
    if ranks == 1:
        return 0.0
    cdf = statistics.NormalDist().cdf
    points = [number / 100 for number in range(901)]
    above = [1 - cdf(x) ** ranks for x in points]
    below = [cdf(-x) ** ranks for x in points]
    return (sum(above) - above[0] / 2 - sum(below) + below[0] / 2) / 100


def hidden_bound_s(
    compute: RankCompute,
    rows: float,
    micro_batches: int,
    sync: GradientSync,
    network: Network,
) -> float:
    """Return the step's time if synchronisation overlapped every backward.

    This is a lower bound.
    """
    alone = compute.forward_backward_s(rows)
    backward = micro_batches * alone * (1 - compute.forward_share)
    transfer_s = all_reduce_s(compute.elements * sync.element_bytes, network)
    return (
        micro_batches * alone
        + max(0.0, transfer_s - backward)
        + compute.optimizer_step_s
    )
