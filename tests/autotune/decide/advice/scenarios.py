"""For each rule of advice a training in which following it is worth what it promises, and one in which it is silent.

All of these are worlds of arithmetic (``tests.autotune.decide.worlds``); ``benchmarks.advice`` follows some rules for
real, by training on this machine. If a rule's own arithmetic is all there is to a world, as in the memory of a foreach
optimizer, ``tests.simulators.sizes`` measures it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.advice import Advice
from autotune.core.outcome import Contaminated, Measured, Outcome
from autotune.core.trial import FinishedTrial, Trial
from autotune.decide.advice.situation import DataFacts, Foreign, Situation
from autotune.decide.advice.table import NOTHING, TOO_LITTLE, advise, with_changes
from autotune.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run
from autotune.decide.counters import counters_of_profile
from tests.autotune.decide.worlds import (
    World,
    memory_bytes,
    most_rows,
    profile_of,
    run_of,
    settings,
    settings_with,
    step,
)
from tests.autotune.profiles import but
from trainer.config import TrainConfig

DATA = DataFacts(path="DATA", prepared=True, vocab_size=16_384, token_bytes=2 * 10**9, filesystem="ext4")
VARIED = ("memory_bytes_per_s", "launch_s", "load_s_per_row", "mean_document_tokens", "node_bytes_per_s")
Benefit = Callable[[Advice], float]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A rule, a situation in which it speaks, one in which it is silent, and what following it delivers."""

    rule: str
    what: str
    speaks: Callable[[], Situation]
    silent: Callable[[], Situation]
    delivered: Benefit | None = None
    """The ratio of what the gain is of; None if the rule promises none."""

    def spoken(self) -> Advice | None:
        return next((one for one in advise(self.speaks()) if one.rule == self.rule), None)

    def is_silent(self) -> bool:
        return all(one.rule != self.rule for one in advise(self.silent()))


def scenarios(seed: int = 0) -> tuple[Scenario, ...]:
    """All of them, in worlds that differ by their seed; all but the first a little faster here and slower there."""
    from tests.autotune.decide.advice.scenarios_of_networks import of_network

    draw = random.Random(seed)
    gpu, cluster = World(), World(nodes=8, ranks_per_node=2, node_bytes_per_s=2e11)
    if seed:
        gpu, cluster = (
            replace(world, **{name: getattr(world, name) * draw.uniform(0.75, 1.33) for name in VARIED})
            for world in (gpu, cluster)
        )
    parts = (of_loader(gpu, cluster), of_batch(gpu), of_compute(gpu, cluster), of_network(gpu, cluster))
    return (*(one for part in parts for one in part), *of_condition(gpu))


# What is known in a world, put together for rules to look at.


def tuned(world: World, train: TrainConfig, **changes: object) -> Situation:
    """After tuning with good settings; the profile then says something else."""
    profile = profile_of(world, train).model_copy(update={"train": settings_with(train, **changes)})
    return Situation(train=profile.train, profile=profile, bottleneck=bottleneck_of_profile(profile), data=DATA)


def ran(world: World, train: TrainConfig, *, with_profile: bool = False, noise_scale: float | None = None) -> Situation:
    run = run_of(world, train, noise_scale=noise_scale, first_step=1 if noise_scale is None else 5000)
    profile = profile_of(world, train) if with_profile else None
    counters = None if profile is None else counters_of_profile(profile)
    return Situation(train=train, profile=profile, run=run, bottleneck=bottleneck_of_run(run, counters), data=DATA)


def rates(world: World, train: TrainConfig) -> Benefit:
    """True tokens/s with the advice followed, to those without."""
    return lambda advice: speed(world, with_changes(train, advice.changes)) / speed(world, train)


def speed(world: World, train: TrainConfig) -> float:
    return step(world, train).real_tokens_per_s


def trial_of(job: str, outcome: Outcome, **measured: object) -> FinishedTrial:
    trial = Trial(job=job, measured=measured, timeout_s=0.0)
    return FinishedTrial(trial=trial, outcome=outcome, seconds=10.0, label="", from_ledger=True)


def step_trial(gpu: World, train: TrainConfig, rows: int) -> FinishedTrial:
    """A trial of such a micro-batch that ran, with its peak."""
    peak = Measured(figures={"peak_bytes": int(memory_bytes(gpu, train, rows))})
    return trial_of("step", peak, config={"micro_batch_rows": rows})


# Data and loader workers.


def of_loader(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    slow = replace(gpu, load_s_per_row=2e-3)
    starved, many = settings(slow, data__loader_workers=1), settings(slow, data__loader_workers=8)
    shared = replace(gpu, staged=False, storage_rows_per_s=900.0)
    reading, good = settings(shared, data__loader_workers=8), settings(cluster)
    hindered, even = replace(cluster, slow_loader=100.0), replace(cluster, load_s_per_row=2e-3)
    raw = DataFacts(path="RAW", prepared=False, kinds=("elf",), raw_bytes=10**9)

    def memory(advice: Advice) -> float:
        after, before = (2**30 + int(count) * 2**29 for count in (advice.changes[0].new, advice.changes[0].old))
        return after / before

    def undecided() -> Situation:
        now = tuned(slow, starved)
        assert now.profile is not None and now.workers is not None
        workers = now.workers.model_copy(update={"undecided_between": [2, 4]})
        return replace(now, profile=but(now.profile, evidence={"workers": workers}))

    return (
        Scenario(
            "raw-data", "a directory of programs",
            lambda: Situation(train=None, data=raw), lambda: Situation(train=None, data=DATA),
        ),
        Scenario(
            "staging", "eight nodes read one shared file system", lambda: ran(shared, reading, with_profile=True),
            lambda: ran(gpu, settings(gpu, data__loader_workers=8), with_profile=True), rates(shared, reading),
        ),
        Scenario(
            "more-workers", "one worker for a device that could take several times as much",
            lambda: tuned(slow, starved), lambda: tuned(slow, starved, data__loader_workers=8), rates(slow, starved),
        ),
        Scenario(
            "starved-rank", "the loader of one rank of sixteen is a hundred times as slow as the others'",
            lambda: ran(hindered, good), lambda: ran(even, settings(even, data__loader_workers=1)),
            lambda _: speed(cluster, good) / speed(hindered, good),
        ),
        Scenario(
            "fewer-workers", "sixteen workers where two are enough",
            lambda: tuned(slow, many, data__loader_workers=8), lambda: tuned(slow, starved), memory,
        ),
        Scenario("undecided-workers", "a sweep that noise did not let end", undecided, lambda: tuned(slow, many)),
    )  # fmt: skip


# The micro-batch and the global batch.


def of_batch(gpu: World) -> tuple[Scenario, ...]:
    small = settings(gpu, micro_batch_rows=2, global_batch_rows=256)
    large = settings(gpu, global_batch_rows=4096)
    most = most_rows(gpu, large)

    def full() -> Situation:
        trials = tuple(step_trial(gpu, large, rows) for rows in (8, 16, 32, 64, 128, 256, most - 10))
        return replace(tuned(gpu, large, micro_batch_rows=most - 10), trials=trials)

    def memory(advice: Advice) -> float:
        after = with_changes(settings_with(large, micro_batch_rows=most - 10), advice.changes)
        return memory_bytes(gpu, large, after.micro_batch_rows) / memory_bytes(gpu, large, most - 10)

    return (
        Scenario(
            "beyond-memory", "more than was shown to fit",
            lambda: tuned(gpu, large, micro_batch_rows=most + 5), lambda: tuned(gpu, large),
        ),
        Scenario(
            "below-knee", "two sequences on a device that wants dozens",
            lambda: tuned(gpu, small), lambda: tuned(gpu, large, micro_batch_rows=64), rates(gpu, small),
        ),
        Scenario(
            "beyond-knee", "as many as fit, though a few are as fast",
            full, lambda: tuned(gpu, large, micro_batch_rows=16), memory,
        ),
        Scenario(
            "beyond-noise-scale", "a noisy quadratic, descended with the best rate of each batch",
            lambda: ran(gpu, large, noise_scale=2e5), lambda: ran(gpu, large, noise_scale=4e6),
            _tokens_to_loss(gpu, large, 2e5),
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

    per_row = train.seq_length_tokens * gpu.packed_fill
    return lambda advice: tokens(advice.changes[0].new * per_row) / tokens(train.global_batch_rows * per_row)


# What a rank computes, and what its device waits for.


def of_compute(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    good, padded = settings(gpu), settings(gpu, layout="padded")
    dense, whole = settings(gpu, head="dense", last_layer="all"), settings(gpu, last_layer="all")
    exact, dropping = settings(gpu, precision="fp32"), settings(gpu, attention_dropout=0.1)
    gappy, logged = replace(gpu, launch_s=1e-4), replace(gpu, between_s=0.2)
    slow_memory, fused = replace(gpu, memory_bytes_per_s=6e11), settings(gpu, compile_layers=True)
    updating = replace(cluster, nodes=1, ranks_per_node=8, memory_bytes_per_s=2e11)
    few = settings(updating, micro_batch_rows=4, global_batch_rows=32)
    uneven = replace(gpu, ranks_per_node=32, seq_length=8192, mean_document_tokens=3000.0)
    odd = settings(uneven, micro_batch_rows=64, global_batch_rows=33)
    tight = replace(gpu, memory_bytes=12 * 10**9)
    most = most_rows(tight, settings(tight))
    full = tuned(tight, settings(tight, micro_batch_rows=most))
    tighter = replace(full, trials=(step_trial(tight, settings(tight), most),))

    def copied(advice: Advice) -> float:
        # torch's foreach AdamW holds one temporary of all weights; tests.simulators.sizes measures it.
        peak = memory_bytes(tight, settings(tight), most)
        return peak / (peak + 4 * tight.parameters)

    def tuned_well() -> Situation:
        return tuned(gpu, good)

    def ran_well() -> Situation:
        return ran(gpu, good)

    def ran_padded() -> Situation:
        return ran(gpu, padded)

    def young() -> Situation:
        now = ran_well()
        assert now.run is not None
        return replace(now, run=replace(now.run, steps=now.run.steps[:1]), bottleneck=None)

    return (
        Scenario("padding", "every document in a sequence of its own", ran_padded, ran_well, rates(gpu, padded)),
        Scenario(
            "empty-rows", "33 sequences for 32 ranks",
            lambda: ran(uneven, odd), lambda: ran(uneven, settings_with(odd, global_batch_rows=64)), rates(uneven, odd),
        ),
        Scenario("full-precision", "TF32 on an H100", lambda: tuned(gpu, exact), tuned_well, rates(gpu, exact)),
        Scenario(
            "half-precision", "gradients in fp16",
            lambda: ran(gpu, settings(gpu, parallel__gradient_dtype="fp16")), ran_well,
        ),
        Scenario("dense-head", "logits everywhere", lambda: ran(gpu, dense), ran_well, rates(gpu, dense)),
        Scenario(
            "whole-last-layer", "a last layer that is not needed", lambda: ran(gpu, whole), ran_well, rates(gpu, whole)
        ),
        Scenario(
            "attention-dropout", "BERT's own dropout, packed",
            lambda: ran(gpu, dropping), ran_well, rates(gpu, dropping),
        ),
        Scenario(
            "host-bound", "a host that launches slowly", lambda: tuned(gappy, good), tuned_well, rates(gappy, good)
        ),
        Scenario(
            "host-bound", "every step logged at length", lambda: ran(logged, good), ran_well, rates(logged, good)
        ),
        Scenario(
            "memory-bound", "slow memory under fast products",
            lambda: tuned(slow_memory, good), lambda: tuned(slow_memory, fused), rates(slow_memory, good),
        ),
        Scenario(
            "update-bound", "small steps of eight ranks", lambda: ran(updating, few), ran_well, rates(updating, few)
        ),
        Scenario(
            "foreach-optimizer", "another trainer's optimizer in a full memory",
            lambda: replace(tighter, foreign=Foreign(is_foreach=True)),
            lambda: replace(tighter, foreign=Foreign()), copied,
        ),
        Scenario("computing", "good settings", ran_well, ran_padded),
        Scenario(TOO_LITTLE, "a run of one step", young, ran_well),
        Scenario(NOTHING, "good settings, all measured", ran_well, ran_padded),
        _too_big(),
    )  # fmt: skip


def _too_big() -> Scenario:
    world = World(layers=24, hidden=1024, ranks_per_node=8, memory_bytes=9 * 10**9, launch_s=1.2e-5)
    train = settings(world, micro_batch_rows=4, global_batch_rows=32 * 8)
    roomy = replace(world, memory_bytes=94 * 10**9)

    def best(config: TrainConfig) -> float:
        rows = most_rows(world, config)
        return speed(world, config.model_copy(update={"micro_batch_rows": rows, "global_batch_rows": 8 * rows}))

    return Scenario(
        "too-big-for-ddp", "a third of a billion weights on 9 GB",
        lambda: tuned(world, train), lambda: tuned(roomy, settings(roomy)),
        lambda advice: best(with_changes(train, advice.changes)) / best(train),
    )  # fmt: skip


# What is wrong with a machine or a profile.


def of_condition(gpu: World) -> tuple[Scenario, ...]:
    good = settings(gpu)
    hot, shared = (
        trial_of("step", Contaminated(detail=detail))
        for detail in (
            "GPU 0 was slowed down: hw_thermal in 4 of 9 samples, at up to 91 °C",
            "another process computed on GPU 0: 2 were on it in 3 of 9 samples",
        )
    )
    lazy = replace(gpu, reached={"bf16": 0.1, "tf32": 0.12, "fp32": 0.5})

    def now(**changes: object) -> Situation:
        return replace(tuned(gpu, good), **changes)

    def beside(void: FinishedTrial) -> Callable[[], Situation]:
        return lambda: now(trials=(void, step_trial(gpu, good, 8)))

    return (
        Scenario("thermal", "a GPU that is too hot", beside(hot), beside(shared)),
        Scenario("company", "a neighbour on the GPU", beside(shared), beside(hot)),
        Scenario(
            "utilisation", "98 % utilisation at a tenth of the peak",
            lambda: ran(lazy, good, with_profile=True), lambda: ran(gpu, good),
        ),
        Scenario("edited", "a profile that was edited", lambda: now(intact=False), now),
        Scenario(
            "not-measured", "no sweep of workers", lambda: now(missing=(("loader workers", "autotune workers"),)), now
        ),
    )  # fmt: skip
