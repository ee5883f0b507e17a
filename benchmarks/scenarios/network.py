"""Scenarios of ranks, nodes and the exchange of gradients."""

from dataclasses import replace
from typing import Any

from autotune.core.advice import Advice
from autotune.core.evidence import ExchangeRow, NetworkEvidence
from autotune.core.outcome import Measured
from autotune.core.trial import FinishedTrial, Trial
from autotune.decide.advice import Situation, Spread
from autotune.decide.bottleneck import bottleneck_of_run
from benchmarks.scenarios.situations import Scenario, ran, rates, tuned, with_evidence
from benchmarks.simulated_cluster import Recipe, SimulatedCluster, SimulatedModel, Simulator
from benchmarks.simulated_training import World, settings, settings_with, step


def of_network(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    """Slow links, slow ranks, and too many nodes."""
    slow = replace(cluster, node_bytes_per_s=5e9)
    train = settings(slow, global_batch_rows=64 * 16)
    good = settings(cluster, global_batch_rows=64 * 16)
    limping = replace(cluster, slow_rank=1.3)
    one_slow = replace(cluster, slow_link=0.3, node_bytes_per_s=1e10)
    many = settings(one_slow, global_batch_rows=64 * 16)

    def halved(advice: Advice) -> float:
        return rates(slow, train)(replace(advice, changes=())) * (
            step(slow, settings_with(train, parallel__gradient_dtype="bf16")).real_tokens_per_s
            / step(slow, train).real_tokens_per_s
        )

    def without_slow_rank(advice: Advice) -> float:
        return step(cluster, good).real_tokens_per_s / step(limping, good).real_tokens_per_s

    def without_slow_link(advice: Advice) -> float:
        return step(replace(one_slow, slow_link=1.0), many).real_tokens_per_s / step(one_slow, many).real_tokens_per_s

    mixed = replace(cluster, uneven_rows=0.3)
    uneven = settings(mixed, layout="bucketed", attention_dropout=0.1)

    def in_turns(now: Situation) -> Situation:
        """The rank that takes longest is another one in every step."""
        assert now.run is not None
        steps = [row.model_copy(update={"slowest_rank": 1 + row.step % 7}) for row in now.run.steps]
        run = replace(now.run, steps=tuple(steps))
        return replace(now, run=run, bottleneck=bottleneck_of_run(run))

    def linked(world: World) -> Situation:
        rates_ = [world.node_bytes_per_s] * world.nodes
        rates_[2] *= world.slow_link
        return replace(ran(world, many), trials=(_links_trial(tuple(rates_)),))

    spread_world = replace(cluster, nodes=64, node_bytes_per_s=2e10)
    fixed_batch = settings(spread_world, micro_batch_rows=64, global_batch_rows=2 * 64 * 32)

    def efficiency(nodes: int, batch: int = 1) -> float:
        train = settings_with(fixed_batch, global_batch_rows=batch * fixed_batch.global_batch_rows)
        alone = step(replace(spread_world, nodes=1), train).real_tokens_per_s
        return step(replace(spread_world, nodes=nodes), train).real_tokens_per_s / nodes / alone

    def spread(nodes: int, twice: float | None = None) -> Situation:
        useful = max(count for count in range(1, 65) if efficiency(count) >= 0.9)
        tokens = fixed_batch.global_batch_rows * 512 * 0.995 / (2 * nodes)
        found = Spread(
            nodes=nodes, efficiency=efficiency(nodes), efficiency_low=None, efficiency_high=None, useful_nodes=useful,
            useful_efficiency=efficiency(useful), tokens_per_rank=tokens, least_tokens_per_rank=60_000.0,
            twice_the_batch_efficiency=twice, source="simulated",
        )  # fmt: skip
        return replace(ran(spread_world, fixed_batch), spread=found)

    def hours(advice: Advice) -> float:
        useful = max(count for count in range(1, 65) if efficiency(count) >= 0.9)
        return efficiency(64) / efficiency(useful)

    def twice(advice: Advice) -> float:
        doubled = settings_with(fixed_batch, global_batch_rows=2 * fixed_batch.global_batch_rows)
        return step(spread_world, doubled).real_tokens_per_s / step(spread_world, fixed_batch).real_tokens_per_s

    return (
        Scenario(
            rule="exchange", what="default buckets where others were measured to be faster",
            speaks=lambda: _exchanges(gpu, 5), delivered=_bucketed, silent=lambda: _exchanges(gpu, 100),
        ),
        Scenario(
            rule="network-bound", what="gradients that travel longer than backward", speaks=lambda: ran(slow, train),
            delivered=halved, silent=lambda: ran(cluster, good),
        ),
        Scenario(
            rule="too-many-nodes", what="64 nodes for a batch that keeps a few busy", speaks=lambda: spread(64),
            delivered=hours, silent=lambda: spread(1),
        ),
        Scenario(
            rule="below-t-min", what="the same, with a batch that may grow",
            speaks=lambda: spread(64, twice=efficiency(64, batch=2)), delivered=twice,
            silent=lambda: spread(1, twice=1.0),
        ),
        Scenario(
            rule="slow-rank", what="a rank that takes 1.3 times as long", speaks=lambda: ran(limping, good),
            delivered=without_slow_rank, silent=lambda: ran(cluster, good),
        ),
        Scenario(
            rule="uneven-ranks", what="every step another rank that has more to do",
            speaks=lambda: in_turns(ran(mixed, uneven)), delivered=rates(mixed, uneven),
            silent=lambda: ran(limping, good),
        ),
        Scenario(
            rule="slow-link", what="one link with a third of the others' speed", speaks=lambda: linked(one_slow),
            delivered=without_slow_link, silent=lambda: linked(replace(one_slow, slow_link=1.0)),
        ),
    )  # fmt: skip


def _links_trial(neighbours: tuple[float, ...]) -> FinishedTrial:
    figures = {
        "all": [], "within": [], "between": [], "neighbours_bytes_per_s": list(neighbours), "products_flops_per_s": [],
        "nodes": len(neighbours), "ranks_per_node": 2, "backend": "nccl", "transport": "tcp", "interface": None,
        "interface_bytes_per_s": None,
    }  # fmt: skip
    return FinishedTrial(
        trial=Trial(job="links", measured={}, timeout_s=0.0), outcome=Measured(figures=figures), seconds=10.0, label="",
        from_ledger=True,
    )  # fmt: skip


CAPS_MIB, DEFAULT_CAP_MIB = (25, 5, 100), 25


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
    middle = sorted(rounds)[1]
    return {"ratio_to_default": middle, "ratio_low": min(rounds) * 0.98, "ratio_high": max(rounds) * 1.02}


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
    return replace(now, profile=with_evidence(now.profile, network=network))
