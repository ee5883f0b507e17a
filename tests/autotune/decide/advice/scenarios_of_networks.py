"""Scenarios of ranks, nodes and the exchange of gradients."""

from dataclasses import replace
from typing import Any

from autotune.core.advice import Advice
from autotune.core.evidence import ExchangeRow, NetworkEvidence
from autotune.core.interval import Interval
from autotune.core.outcome import Measured
from autotune.decide.advice.situation import NodesMeant, Situation
from autotune.decide.bottleneck import bottleneck_of_run
from tests.autotune.decide.advice.scenarios import Scenario, ran, rates, speed, trial_of, tuned
from tests.autotune.decide.worlds import World, settings, settings_with
from tests.autotune.profiles import but
from tests.simulators.cluster import Recipe, SimulatedCluster, SimulatedModel, Simulator

CAPS_MIB, DEFAULT_CAP_MIB = (25, 5, 100), 25


def of_network(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    slow, limping = replace(cluster, node_bytes_per_s=5e9), replace(cluster, slow_rank=1.3)
    train = settings(slow, global_batch_rows=64 * 16)  # in all of these worlds
    halved = settings_with(train, parallel__gradient_dtype="bf16")
    one_slow = replace(cluster, slow_link=0.3, node_bytes_per_s=1e10)
    linked = replace(one_slow, slow_link=1.0)
    mixed = replace(cluster, uneven_rows=0.3)
    uneven = settings(mixed, layout="bucketed", attention_dropout=0.1)

    def in_turns(now: Situation) -> Situation:
        """The rank that takes longest is another one in every step."""
        assert now.run is not None
        steps = [row.model_copy(update={"slowest_rank": 1 + row.step % 7}) for row in now.run.steps]
        run = replace(now.run, steps=tuple(steps))
        return replace(now, run=run, bottleneck=bottleneck_of_run(run))

    def links(world: World) -> Situation:
        neighbours = [world.node_bytes_per_s] * world.nodes
        neighbours[2] *= world.slow_link
        figures = {
            "all": [], "within": [], "between": [], "neighbours_bytes_per_s": neighbours, "products_flops_per_s": [],
            "nodes": world.nodes, "ranks_per_node": 2, "backend": "nccl", "transport": "tcp", "interface": None,
            "interface_bytes_per_s": None,
        }  # fmt: skip
        return replace(ran(world, train), trials=(trial_of("links", Measured(figures=figures)),))

    return (
        Scenario(
            "exchange", "default buckets where others were measured to be faster",
            lambda: _exchanges(gpu, 5), lambda: _exchanges(gpu, 100), _bucketed,
        ),
        Scenario(
            "network-bound", "gradients that travel longer than backward",
            lambda: ran(slow, train), lambda: ran(cluster, train), lambda _: speed(slow, halved) / speed(slow, train),
        ),
        *_of_spread(replace(cluster, nodes=64, node_bytes_per_s=2e10)),
        Scenario(
            "slow-rank", "a rank that takes 1.3 times as long", lambda: ran(limping, train),
            lambda: ran(cluster, train), lambda _: speed(cluster, train) / speed(limping, train),
        ),
        Scenario(
            "uneven-ranks", "every step another rank that has more to do",
            lambda: in_turns(ran(mixed, uneven)), lambda: ran(limping, train), rates(mixed, uneven),
        ),
        Scenario(
            "slow-link", "one link with a third of the others' speed", lambda: links(one_slow), lambda: links(linked),
            lambda _: speed(linked, train) / speed(one_slow, train),
        ),
    )  # fmt: skip


def _of_spread(world: World) -> tuple[Scenario, Scenario]:
    fixed_batch = settings(world, micro_batch_rows=64, global_batch_rows=2 * 64 * 32)
    doubled = settings_with(fixed_batch, global_batch_rows=2 * fixed_batch.global_batch_rows)

    def efficiency(nodes: int, batch: int = 1) -> float:
        train = settings_with(fixed_batch, global_batch_rows=batch * fixed_batch.global_batch_rows)
        return speed(replace(world, nodes=nodes), train) / nodes / speed(replace(world, nodes=1), train)

    def useful() -> int:
        return max(count for count in range(1, 65) if efficiency(count) >= 0.9)

    def spread(nodes: int, twice: float | None = None) -> Situation:
        tokens = fixed_batch.global_batch_rows * 512 * 0.995 / (2 * nodes)
        found = NodesMeant(
            nodes=nodes, efficiency=Interval(value=efficiency(nodes)), useful_nodes=useful(),
            useful_efficiency=efficiency(useful()), tokens_per_rank=tokens, least_tokens_per_rank=60_000.0,
            twice_the_batch_efficiency=twice, source="simulated",
        )  # fmt: skip
        return replace(ran(world, fixed_batch), spread=found)

    return (
        Scenario(
            "too-many-nodes", "64 nodes for a batch that keeps a few busy",
            lambda: spread(64), lambda: spread(1), lambda _: efficiency(64) / efficiency(useful()),
        ),
        Scenario(
            "below-t-min", "the same, with a batch that may grow", lambda: spread(64, twice=efficiency(64, batch=2)),
            lambda: spread(1, twice=1.0), lambda _: speed(world, doubled) / speed(world, fixed_batch),
        ),
    )  # fmt: skip


def _simulated_step_s(cap_mib: int, seed: int) -> float:
    """Of a cluster that is simulated bucket by bucket, with high latency, which small buckets pay more often."""
    cluster = SimulatedCluster(
        name="distant", ranks_per_node=2, flops_per_s=2e14, most_micro_batch_tokens=2**17, inter_bytes_per_s=1e10,
        inter_latency_s=4e-4, intra_bytes_per_s=2e11, intra_latency_s=1e-5, micro_batch_extra_s=1e-3,
        update_elements_per_s=5e10, jitter_share=0.01, slowdown_share=0.05,
    )  # fmt: skip
    simulator = Simulator(SimulatedModel(name="base", layers=12, hidden=768, intermediate=3072), cluster, seed)
    recipe = Recipe(nodes=16, global_tokens=2**20, micro_batches=1, bucket_cap_bytes=cap_mib * 2**20)
    return simulator.step_s(recipe, steps=20)


def _bucketed(advice: Advice) -> float:
    cap = {change.key: change for change in advice.changes}["parallel.bucket_cap_mib"]
    return _simulated_step_s(cap.old, seed=1) / _simulated_step_s(cap.new, seed=2)


def _against_default(cap_mib: int) -> dict[str, Any]:
    """As three rounds would say it."""
    if cap_mib == DEFAULT_CAP_MIB:
        return {}
    rounds = [_simulated_step_s(DEFAULT_CAP_MIB, seed) / _simulated_step_s(cap_mib, seed) for seed in (3, 4, 5)]
    return {"ratio_to_default": sorted(rounds)[1], "ratio_low": min(rounds) * 0.98, "ratio_high": max(rounds) * 1.02}


def _exchanges(gpu: World, cap_mib: int) -> Situation:
    """Buckets of several sizes were measured, and the profile has one of them."""
    train = settings(gpu, parallel__bucket_cap_mib=cap_mib)
    now = tuned(gpu, train)
    assert now.profile is not None
    rows = [
        ExchangeRow(
            strategy="ddp", gradient_dtype="fp32", bucket_cap_mib=cap, micro_batches=1, rows=train.micro_batch_rows,
            step_s=_simulated_step_s(cap, seed=0), steps=20, real_tokens_per_s=2**20 / _simulated_step_s(cap, seed=0),
            communication_share=0.05, outcome="ran", **_against_default(cap),
        )
        for cap in CAPS_MIB
    ]  # fmt: skip
    network = NetworkEvidence(
        nodes=2, ranks_per_node=2, backend="nccl", transport="tcp", links=[], products_flops_per_s=[1.0, 1.0],
        exchanges=rows, choice="", windows=3, seconds=1.0,
    )  # fmt: skip
    return replace(now, profile=but(now.profile, evidence={"network": network}))
