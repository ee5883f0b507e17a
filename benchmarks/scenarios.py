"""For each rule of advice a training in which following it is worth what was said, and one in which it is silent.

All of these are simulated; ``benchmarks.advice`` follows some of the rules for real, by training on this machine.
Worlds share no formula with the rules; see ``benchmarks.simulated_training``.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune.core.advice import Advice
from autotune.core.evidence import ExchangeRow, NetworkEvidence
from autotune.core.outcome import Contaminated, Measured
from autotune.core.profile import Profile
from autotune.core.trial import FinishedTrial, Trial
from autotune.decide.advice import NOTHING, TOO_LITTLE, DataFacts, Foreign, Situation, Spread, advise
from autotune.decide.advice.apply import with_changes
from autotune.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run, counters_of_profile
from benchmarks.simulated_cluster import Recipe, SimulatedCluster, SimulatedModel, Simulator
from benchmarks.simulated_records import profile_of, run_of
from benchmarks.simulated_training import World, memory_bytes, most_rows, settings, step
from trainer.config import TrainConfig

DATA = DataFacts(path="DATA", prepared=True, vocab_size=16_384, token_bytes=2 * 10**9, filesystem="ext4")
Benefit = Callable[[Advice], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A rule, where it speaks, what following it delivers, and where it is silent."""

    rule: str
    what: str
    speaks: Callable[[], Situation]
    silent: Callable[[], Situation]
    delivered: Benefit | None = None
    """The ratio of what the gain is of; None where the rule promises none."""


def scenarios(seed: int = 0) -> tuple[Scenario, ...]:
    """All of them, in worlds that differ by their seed."""
    gpu, cluster = worlds(seed)
    return (*_loader(gpu), *_batch(gpu), *_compute(gpu, cluster), *_network(gpu, cluster), *_condition(gpu))


# Putting situations together.


def tuned(world: World, train: TrainConfig, **changes: object) -> Situation:
    """After tuning with good settings; the profile then says something else."""
    profile = profile_of(world, train)
    profile = profile.model_copy(update={"train": settings_with(train, **changes)})
    return Situation(train=profile.train, profile=profile, bottleneck=bottleneck_of_profile(profile), data=DATA)


def ran(world: World, train: TrainConfig, *, with_profile: bool = False, noise_scale: float | None = None) -> Situation:
    """After a run."""
    run = run_of(world, train, noise_scale=noise_scale, first_step=1 if noise_scale is None else 5000)
    profile = profile_of(world, train) if with_profile else None
    counters = None if profile is None else counters_of_profile(profile)
    return Situation(train=train, profile=profile, run=run, bottleneck=bottleneck_of_run(run, counters), data=DATA)


def settings_with(train: TrainConfig, **changes: object) -> TrainConfig:
    """The same with differences; a double underscore stands for a dot."""
    tables = train.model_dump(mode="json")
    for key, value in changes.items():
        *path, last = key.split("__")
        table = tables
        for name in path:
            table = table[name]
        table[last] = value
    return TrainConfig.model_validate(tables)


def rates(world: World, train: TrainConfig) -> Benefit:
    """True tokens/s with the advice followed, to those without."""

    def delivered(advice: Advice) -> float:
        after = step(world, with_changes(train, advice.changes))
        return after.real_tokens_per_s / step(world, train).real_tokens_per_s

    return delivered


# The scenarios.


def worlds(seed: int) -> tuple[World, World]:
    """A gpu, and a cluster of them; all but the first a little faster here and slower there."""
    draw = random.Random(seed)

    def varied(world: World) -> World:
        if seed == 0:
            return world
        changes = {name: getattr(world, name) * draw.uniform(0.75, 1.33) for name in VARIED}
        return replace(world, **changes)

    return varied(World()), varied(World(nodes=8, ranks_per_node=2, node_bytes_per_s=2e11))


VARIED = ("memory_bytes_per_s", "launch_s", "load_s_per_row", "mean_document_tokens", "node_bytes_per_s")


def _loader(gpu: World) -> tuple[Scenario, ...]:
    slow = replace(gpu, load_s_per_row=2e-3)
    starved = settings(slow, data__loader_workers=1)
    shared = replace(gpu, staged=False, storage_rows_per_s=900.0)
    reading = settings(shared, data__loader_workers=8)
    many = settings(slow, data__loader_workers=8)

    def memory(advice: Advice) -> float:
        after, before = (2**30 + int(count) * 2**29 for count in (advice.changes[0].new, advice.changes[0].old))
        return after / before

    def undecided() -> Situation:
        now = tuned(slow, starved)
        assert now.profile is not None and now.workers is not None
        workers = now.workers.model_copy(update={"undecided_between": [2, 4]})
        return replace(now, profile=_with(now.profile, workers=workers))

    return (
        Scenario(
            rule="raw-data", what="a directory of programs", speaks=lambda: Situation(
                train=None, data=DataFacts(path="RAW", prepared=False, kinds=("elf",), raw_bytes=10**9)
            ),
            silent=lambda: Situation(train=None, data=DATA),
        ),
        Scenario(
            rule="staging", what="eight nodes read one shared file system",
            speaks=lambda: ran(shared, reading, with_profile=True), delivered=rates(shared, reading),
            silent=lambda: ran(gpu, settings(gpu, data__loader_workers=8), with_profile=True),
        ),
        Scenario(
            rule="more-workers", what="one worker makes rows for a device that could take several times as many",
            speaks=lambda: tuned(slow, starved), delivered=rates(slow, starved),
            silent=lambda: tuned(slow, starved, data__loader_workers=8),
        ),
        Scenario(
            rule="fewer-workers", what="sixteen workers where two are enough",
            speaks=lambda: tuned(slow, many, data__loader_workers=8), delivered=memory,
            silent=lambda: tuned(slow, starved),
        ),
        Scenario(
            rule="undecided-workers", what="a sweep that noise did not let end", speaks=undecided,
            silent=lambda: tuned(slow, many),
        ),
    )  # fmt: skip


def _batch(gpu: World) -> tuple[Scenario, ...]:
    small = settings(gpu, micro_batch_rows=2, global_batch_rows=256)
    large = settings(gpu, global_batch_rows=4096)
    fits = profile_of(gpu, large).evidence.probe
    assert fits is not None
    most = fits.feasible_max
    wide = settings(gpu, micro_batch_rows=64, global_batch_rows=4096)

    def with_peaks(now: Situation) -> Situation:
        return replace(
            now, trials=tuple(_step_trial(gpu, large, rows) for rows in (8, 16, 32, 64, 128, 256, most - 10))
        )

    def memory(advice: Advice) -> float:
        after = with_changes(settings_with(large, micro_batch_rows=most - 10), advice.changes)
        return memory_bytes(gpu, large, after.micro_batch_rows) / memory_bytes(gpu, large, most - 10)

    return (
        Scenario(
            rule="beyond-memory", what="more rows than were shown to fit",
            speaks=lambda: tuned(gpu, large, micro_batch_rows=most + 5), silent=lambda: tuned(gpu, large),
        ),
        Scenario(
            rule="below-knee", what="two rows on a device that wants dozens", speaks=lambda: tuned(gpu, small),
            delivered=rates(gpu, small), silent=lambda: tuned(gpu, large, micro_batch_rows=64),
        ),
        Scenario(
            rule="beyond-knee", what="as many rows as fit, though a few are as fast",
            speaks=lambda: with_peaks(tuned(gpu, large, micro_batch_rows=most - 10)), delivered=memory,
            silent=lambda: tuned(gpu, large, micro_batch_rows=16),
        ),
        Scenario(
            rule="beyond-noise-scale", what="a noisy quadratic, descended with the best rate of each batch",
            speaks=lambda: ran(gpu, wide, noise_scale=2e5), delivered=_tokens_to_loss(gpu, wide, 2e5),
            silent=lambda: ran(gpu, wide, noise_scale=4e6),
        ),
    )  # fmt: skip


def _tokens_to_loss(gpu: World, train: TrainConfig, noise_scale: float) -> Benefit:
    """Tokens for each bit that the loss of a quadratic falls by a step with the best rate; the new batch to the old."""
    dimensions, tries = 200, 400

    def tokens(batch: float) -> float:
        draw = np.random.default_rng(0)
        place = np.ones(dimensions)  # of curvature 1, so this is the gradient as well
        # Noise whose covariance has the trace that makes the noise scale of the gradient here.
        spread = np.sqrt(noise_scale * np.square(place).sum() / dimensions)
        noisy = place + draw.normal(0, spread / np.sqrt(batch), (tries, dimensions))
        losses = [np.square(place - rate * noisy).sum(axis=1).mean() for rate in np.linspace(0.01, 1.5, 150)]
        return batch / float(np.square(place).sum() - min(losses))

    def delivered(advice: Advice) -> float:
        per_row = train.seq_length_tokens * gpu.packed_fill
        return tokens(advice.changes[0].new * per_row) / tokens(train.global_batch_rows * per_row)

    return delivered


def _compute(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    padded, dense = settings(gpu, layout="padded"), settings(gpu, head="dense", last_layer="all")
    whole, exact = settings(gpu, last_layer="all"), settings(gpu, precision="fp32")
    dropping = settings(gpu, attention_dropout=0.1)
    gappy = replace(gpu, launch_s=1e-4)
    slow_memory = replace(gpu, memory_bytes_per_s=6e11)
    logged = replace(gpu, between_s=0.2)
    updating = replace(cluster, nodes=1, ranks_per_node=8, memory_bytes_per_s=2e11)
    few = settings(updating, micro_batch_rows=4, global_batch_rows=32)
    uneven = replace(gpu, ranks_per_node=32, seq_length=8192, mean_document_tokens=3000.0)
    odd: dict[str, object] = {"micro_batch_rows": 64, "global_batch_rows": 33}
    good = settings(gpu)
    tight = replace(gpu, memory_bytes=12 * 10**9)
    halved = settings(gpu, parallel__gradient_dtype="fp16")
    foreach = Foreign(source="args.json", optimizer="foreach")
    most = most_rows(tight, settings(tight))
    full = tuned(tight, settings(tight, micro_batch_rows=most))
    tighter = replace(full, trials=(_step_trial(tight, settings(tight), most),))

    def copied(advice: Advice) -> float:
        # torch's foreach AdamW holds one temporary of all weights; benchmarks.sizes measures it.
        peak = memory_bytes(tight, settings(tight), most)
        return peak / (peak + 4 * tight.parameters)

    return (
        Scenario(
            rule="padding", what="every sample in a row of its own", speaks=lambda: ran(gpu, padded),
            delivered=rates(gpu, padded), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="empty-rows", what="33 rows for 32 ranks", speaks=lambda: ran(uneven, settings(uneven, **odd)),
            delivered=_even(uneven, odd),
            silent=lambda: ran(uneven, settings(uneven, **(odd | {"global_batch_rows": 64}))),
        ),
        Scenario(
            rule="full-precision", what="TF32 on an H100", speaks=lambda: tuned(gpu, exact),
            delivered=rates(gpu, exact), silent=lambda: tuned(gpu, good),
        ),
        Scenario(
            rule="half-precision", what="gradients in fp16", speaks=lambda: ran(gpu, halved),
            silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="dense-head", what="logits everywhere", speaks=lambda: ran(gpu, dense), delivered=rates(gpu, dense),
            silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="whole-last-layer", what="a last layer that nobody looks at", speaks=lambda: ran(gpu, whole),
            delivered=rates(gpu, whole), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="attention-dropout", what="BERT's own dropout, packed", speaks=lambda: ran(gpu, dropping),
            delivered=rates(gpu, dropping), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="host-bound", what="a host that launches slowly", speaks=lambda: tuned(gappy, good),
            delivered=rates(gappy, good), silent=lambda: tuned(gpu, good),
        ),
        Scenario(
            rule="host-bound", what="every step logged at length", speaks=lambda: ran(logged, good),
            delivered=rates(logged, good), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="memory-bound", what="slow memory under fast products", speaks=lambda: tuned(slow_memory, good),
            delivered=rates(slow_memory, good), silent=lambda: tuned(gpu, good),
        ),
        Scenario(
            rule="update-bound", what="small steps of eight ranks", speaks=lambda: ran(updating, few),
            delivered=rates(updating, few), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="foreach-optimizer", what="another trainer's optimizer in a full memory",
            speaks=lambda: replace(tighter, foreign=foreach), delivered=copied,
            silent=lambda: replace(tighter, foreign=Foreign(source="args.json", optimizer="fused")),
        ),
        Scenario(
            rule="computing", what="good settings", speaks=lambda: ran(gpu, good), silent=lambda: ran(gpu, padded),
        ),
        Scenario(
            rule=TOO_LITTLE, what="a run of one step", speaks=lambda: _young(ran(gpu, good)),
            silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule=NOTHING, what="good settings, all measured", speaks=lambda: ran(gpu, good),
            silent=lambda: ran(gpu, padded),
        ),
        _too_big(),
    )  # fmt: skip


def _even(world: World, odd: dict[str, object]) -> Benefit:
    """Real tokens/s when the global batch divides, to those when it does not."""

    def delivered(advice: Advice) -> float:
        train = settings(world, **odd)
        after = with_changes(train, advice.changes)
        return step(world, after).real_tokens_per_s / step(world, train).real_tokens_per_s

    return delivered


def _too_big() -> Scenario:
    world = World(
        layers=24, hidden=1024, nodes=1, ranks_per_node=8, memory_bytes=9 * 10**9, launch_s=1.2e-5, seq_length=512
    )
    train = settings(world, micro_batch_rows=4, global_batch_rows=32 * 8)

    def delivered(advice: Advice) -> float:
        """The largest micro-batch that the memory then holds, against the largest before."""
        after = with_changes(train, advice.changes)

        def best(config: TrainConfig) -> float:
            fits = profile_of(world, config).evidence.probe
            assert fits is not None
            rows = fits.feasible_max
            return step(
                world, config.model_copy(update={"micro_batch_rows": rows, "global_batch_rows": 8 * rows})
            ).real_tokens_per_s

        return best(after) / best(train)

    roomy = replace(world, memory_bytes=94 * 10**9)
    return Scenario(
        rule="too-big-for-ddp", what="a third of a billion weights on 9 GB", speaks=lambda: tuned(world, train),
        delivered=delivered, silent=lambda: tuned(roomy, settings(roomy)),
    )  # fmt: skip


def _network(gpu: World, cluster: World) -> tuple[Scenario, ...]:
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


def _condition(gpu: World) -> tuple[Scenario, ...]:
    good = settings(gpu)
    hot = _void("gpu 0 was slowed down: hw_thermal in 4 of 9 samples, at up to 91 °C")
    shared = _void("another process computed on gpu 0: 2 were on it in 3 of 9 samples")
    fine = _step_trial(gpu, good, 8)
    lazy = replace(gpu, reached={"bf16": 0.1, "tf32": 0.12, "fp32": 0.5})
    return (
        Scenario(
            rule="thermal", what="a gpu that is too hot", speaks=lambda: replace(tuned(gpu, good), trials=(hot, fine)),
            silent=lambda: replace(tuned(gpu, good), trials=(shared, fine)),
        ),
        Scenario(
            rule="company", what="a neighbour on the gpu",
            speaks=lambda: replace(tuned(gpu, good), trials=(shared, fine)),
            silent=lambda: replace(tuned(gpu, good), trials=(hot, fine)),
        ),
        Scenario(
            rule="utilisation", what="98 % utilisation at a tenth of the peak",
            speaks=lambda: ran(lazy, good, with_profile=True), silent=lambda: ran(gpu, good),
        ),
        Scenario(
            rule="edited", what="a profile that was edited", speaks=lambda: replace(tuned(gpu, good), intact=False),
            silent=lambda: tuned(gpu, good),
        ),
        Scenario(
            rule="not-measured", what="no sweep of workers",
            speaks=lambda: replace(tuned(gpu, good), missing=(("loader workers", "autotune workers"),)),
            silent=lambda: tuned(gpu, good),
        ),
    )  # fmt: skip


# Evidence by hand.


def _young(now: Situation) -> Situation:
    assert now.run is not None
    return replace(now, run=replace(now.run, steps=now.run.steps[:1]), bottleneck=None)


def _with(profile: Profile, **evidence: object) -> Profile:
    return profile.model_copy(update={"evidence": profile.evidence.model_copy(update=evidence)})


def _void(detail: str) -> FinishedTrial:
    return FinishedTrial(
        trial=Trial(job="step", measured={}, timeout_s=0.0), outcome=Contaminated(detail=detail), seconds=10.0,
        label="", from_ledger=True,
    )  # fmt: skip


def _step_trial(gpu: World, train: TrainConfig, rows: int) -> FinishedTrial:
    return FinishedTrial(
        trial=Trial(job="step", measured={"config": {"micro_batch_rows": rows}}, timeout_s=0.0),
        outcome=Measured(figures={"peak_bytes": int(memory_bytes(gpu, train, rows))}), seconds=10.0, label="",
        from_ledger=True,
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
    return replace(now, profile=_with(now.profile, network=network))


def spoken(scenario: Scenario) -> Advice | None:
    """What the rule says where it should speak."""
    return next((one for one in advise(scenario.speaks()) if one.rule == scenario.rule), None)


def is_silent(scenario: Scenario) -> bool:
    """Whether it says nothing where it should not."""
    return all(one.rule != scenario.rule for one in advise(scenario.silent()))
