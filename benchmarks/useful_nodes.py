"""Useful nodes as predicted from two nodes, against brute force.

Brute force is over the simulated cluster: it tries every node count, dtype, bucket size
and accumulation on the simulator itself. The prediction gets the measurements of a
tuning: steps of a rank without gradient synchronisation at two micro-batch sizes,
all-reduces of several sizes within a node and between two, and steps of two nodes with
synchronisation.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.evidence.network import (
    MIB,
    GradientPart,
    GradientSync,
    Network,
    RankCompute,
)
from autotune.network.decide.link_fit import fit_link
from autotune.network.decide.scaling_model import (
    BUCKET_CAPS_BYTES,
    Load,
    ScalingModel,
    gradient_syncs,
    useful_nodes,
)
from autotune.network.decide.step_model import step_time
from testbed.simulators.cluster import (
    CLUSTERS,
    MODELS,
    Recipe,
    SimulatedCluster,
    SimulatedModel,
    Simulator,
)

GLOBAL_TOKENS = 4 * 2**20
ROW_TOKENS = 512
MOST_NODES = 400
SIZES_BYTES = tuple(2**exponent for exponent in range(12, 27, 2))
TRUE_STEPS = 40
"""Enough that the simulator's own noise does not move its answer by a node."""
USEFUL = 0.9
EXTRA_MICRO_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster, and both answers."""

    model: str
    cluster: str
    predicted: int
    true: int
    efficiency_at_true: float

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {name: getattr(self, name) for name in self.__slots__}


def run(
    models: Sequence[SimulatedModel] = MODELS,
    clusters: Sequence[SimulatedCluster] = CLUSTERS,
) -> list[Case]:
    """Predict and search every model on every cluster."""
    return [_case(model, cluster) for model in models for cluster in clusters]


STEPS = 1000
"""Of each measurement: as many as a tuning of a quarter of an hour has."""
PAPERS_NODES = 316
"""Of the paper's cluster."""
MANY_GPUS = 16_384


def run_far(
    models: Sequence[SimulatedModel] = MODELS,
    clusters: Sequence[SimulatedCluster] = CLUSTERS,
) -> list[dict[str, Any]]:
    """Return the step on all nodes of the paper's cluster, predicted and simulated.

    It is predicted from two nodes. The step on 16,384 GPUs is predicted as well, but
    not checked. Every rank has its largest micro-batch.
    """
    rows = []
    for model in models:
        for cluster in clusters:
            simulator = Simulator(model, cluster, seed=1)
            load, network = observed(simulator)
            tokens = load.max_micro_batch_size * ROW_TOKENS * cluster.ranks_per_node

            def predicted(
                nodes: int, load: Load = load, network: Network = network
            ) -> float:
                time = step_time(
                    load.compute,
                    load.max_micro_batch_size,
                    1,
                    GradientSync(),
                    replace(network, nodes=nodes),
                )
                return time.step_s

            recipe = Recipe(
                nodes=PAPERS_NODES, global_tokens=tokens * PAPERS_NODES, micro_batches=1
            )
            many = MANY_GPUS // cluster.ranks_per_node
            rows.append(
                {
                    "model": model.name,
                    "cluster": cluster.name,
                    "predicted_s": predicted(PAPERS_NODES),
                    "simulated_s": simulator.step_s(recipe, steps=20),
                    "efficiency": predicted(1) / predicted(PAPERS_NODES),
                    "efficiency_at_16384_gpus": predicted(1) / predicted(many),
                }
            )
    return rows


def _case(model: SimulatedModel, cluster: SimulatedCluster) -> Case:
    load, network = observed(Simulator(model, cluster, seed=1))
    known = ScalingModel(
        load=load, network=network, gradient_syncs=gradient_syncs(sixteen_bit=True)
    )
    predicted = useful_nodes(known.efficiency, MOST_NODES)
    true, efficiency = _brute_force(Simulator(model, cluster, seed=2), predicted)
    return Case(
        model=model.name,
        cluster=cluster.name,
        predicted=predicted,
        true=true,
        efficiency_at_true=efficiency,
    )


def observed(simulator: Simulator) -> tuple[Load, Network]:
    """Return the load and network that a tuning on two nodes would measure."""
    ranks = simulator.cluster.ranks_per_node
    max_micro_batch_size = simulator.most_micro_batch_tokens // ROW_TOKENS

    within = None
    if ranks > 1:
        within = fit_link(
            [(size, simulator.all_reduce_s(size, 1)) for size in SIZES_BYTES],
            members=ranks,
        ).link
    between = fit_link(
        [
            (size, simulator.all_reduce_s(size, 2) - simulator.all_reduce_s(size, 1))
            for size in SIZES_BYTES
        ],
        members=2,
    )
    network = Network(
        nodes=2, ranks_per_node=ranks, between=between.link, within=within
    )
    compute = _compute(simulator, max_micro_batch_size)
    compute = replace(
        compute,
        slowdown_share=_slowdown(simulator, compute, network, max_micro_batch_size),
    )
    rows = GLOBAL_TOKENS // ROW_TOKENS
    return (
        Load(
            compute=compute,
            global_batch_size=rows,
            tokens_per_sequence=ROW_TOKENS,
            max_micro_batch_size=max_micro_batch_size,
        ),
        network,
    )


def _compute(simulator: Simulator, max_micro_batch_size: int) -> RankCompute:
    """From one rank's steps at two sizes of the micro-batch."""
    one_rank = Simulator(
        simulator.model, replace(simulator.cluster, ranks_per_node=1), seed=3
    )

    def single(rows: int) -> list[float]:
        recipe = Recipe(nodes=1, global_tokens=rows * ROW_TOKENS, micro_batches=1)
        return [one_rank.step_s(recipe, steps=1, sync=False) for _ in range(STEPS)]

    at_most, fewer = (
        single(max_micro_batch_size),
        single(max(1, max_micro_batch_size // 4)),
    )
    # Timed by itself in a step.
    optimizer_step_s = (
        simulator.model.elements / simulator.cluster.update_elements_per_s
    )
    sequence_s = (statistics.fmean(at_most) - statistics.fmean(fewer)) / (
        max_micro_batch_size - max(1, max_micro_batch_size // 4)
    )
    return RankCompute(
        sequence_s=sequence_s,
        micro_batch_s=max(
            0.0,
            statistics.fmean(at_most)
            - optimizer_step_s
            - max_micro_batch_size * sequence_s,
        ),
        optimizer_step_s=optimizer_step_s,
        gradients=tuple(
            GradientPart(elements=elements, ready_share=ready_share)
            for elements, ready_share in simulator.model.gradients()
        ),
        jitter_share=statistics.stdev(at_most)
        / (statistics.fmean(at_most) - optimizer_step_s),
    )


def _slowdown(
    simulator: Simulator,
    compute: RankCompute,
    network: Network,
    max_micro_batch_size: int,
) -> float:
    """Return the share that compute loses during gradient synchronisation.

    It is from steps of two nodes so small that synchronisation fills most of backward.
    """
    sync = GradientSync(gradient_dtype="bf16", bucket_cap_bytes=5 * MIB)
    backward_s = step_time(compute, max_micro_batch_size, 1, sync, network).sync_s * 1.2
    rows = max(
        1,
        min(
            max_micro_batch_size,
            round(backward_s / (1 - compute.forward_share) / compute.sequence_s),
        ),
    )
    recipe = Recipe(
        nodes=2,
        global_tokens=rows * ROW_TOKENS * network.ranks,
        micro_batches=1,
        gradient_dtype="bf16",
        bucket_cap_bytes=sync.bucket_cap_bytes,
    )
    seen = statistics.fmean(simulator.step_s(recipe, steps=1) for _ in range(STEPS))
    without = step_time(compute, rows, 1, sync, network)
    hidden = without.sync_s - without.exposed_s
    return min(0.5, max(0.0, (seen - without.step_s) / hidden)) if hidden > 0 else 0.0


def _brute_force(simulator: Simulator, near: int) -> tuple[int, float]:
    """Return the largest efficient number of nodes, and its efficiency."""
    alone = _best_rate(simulator, 1)
    # Far from the answer a rough look is enough; rates fall with nodes but for a few
    # per cent of bad division.
    nodes = MOST_NODES
    while nodes > 1:
        rough = _best_rate(simulator, nodes, steps=2) / (nodes * alone)
        if rough > USEFUL - 0.03:
            efficiency = _best_rate(simulator, nodes) / (nodes * alone)
            if efficiency >= USEFUL:
                return nodes, efficiency
        nodes -= (
            max(1, int(nodes * (USEFUL - 0.03 - rough) / 4))
            if rough < USEFUL - 0.05
            else 1
        )
    return 1, 1.0


def _best_rate(simulator: Simulator, nodes: int, steps: int = TRUE_STEPS) -> float:
    ranks = nodes * simulator.cluster.ranks_per_node
    rows = GLOBAL_TOKENS // ROW_TOKENS
    if rows < ranks:
        return 0.0
    max_micro_batch_size = simulator.most_micro_batch_tokens // ROW_TOKENS
    least = -(-rows // (ranks * max_micro_batch_size))
    rates = []
    for micro_batches in range(least, least + EXTRA_MICRO_BATCHES):
        # Whole rows: the fullest rank decides.
        each = -(-rows // (ranks * micro_batches))
        slots = each * ranks * micro_batches * ROW_TOKENS
        for dtype in ("fp32", "bf16"):
            for cap in BUCKET_CAPS_BYTES if nodes > 1 else (25 * MIB,):
                recipe = Recipe(
                    nodes=nodes,
                    global_tokens=slots,
                    micro_batches=micro_batches,
                    gradient_dtype="bf16" if dtype == "bf16" else "fp32",
                    bucket_cap_bytes=cap,
                )
                rates.append(GLOBAL_TOKENS / simulator.step_s(recipe, steps=steps))
    return max(rates)
