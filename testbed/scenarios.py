"""For each rule of advice, trainings in which it speaks and in which it is silent.

If it speaks, following it is worth the promised gain. All of these are worlds of
arithmetic (``testbed.simulators.worlds``); ``benchmarks.advice`` follows some rules for
real, by training on this machine, and ``testbed.simulators.sizes`` measures what
storage takes.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autotune.advice.decide.apply import apply_changes
from autotune.advice.decide.bottleneck import bottleneck_of_profile, bottleneck_of_run
from autotune.advice.decide.context import DataFacts, IntendedNodes, TrainingContext
from autotune.advice.decide.gpu_counters import counters_of_profile
from autotune.advice.decide.rules import NOT_JUDGED, NOTHING, TOO_LITTLE, advise
from autotune.base.interval import Interval
from autotune.evidence.advice import Advice, NotJudged
from autotune.evidence.kernels import StepKernels
from autotune.evidence.network import ComputeEvidence, GradientSyncRow, NetworkEvidence
from autotune.evidence.probe import GrownKernel, ThroughputDip
from autotune.evidence.workers import UtilisationFinding
from autotune.kernels.decide.bounds import farthest_kernel
from autotune.profiles.decide.micro_batch import with_headroom
from autotune.subjects.subject import Setting
from autotune.trials.outcomes import Contaminated, Measured, Outcome
from autotune.trials.values import FinishedTrial, Trial
from testbed.examples import kernels
from testbed.examples.own_profiles import own_profile
from testbed.examples.profiles import but
from testbed.simulators import worlds
from testbed.simulators.cluster import (
    Recipe,
    SimulatedCluster,
    SimulatedModel,
    Simulator,
)
from testbed.simulators.worlds import (
    World,
    max_micro_batch_size,
    memory_bytes,
    profile_of,
    run_of,
    settings,
    settings_with,
    step,
)
from trainer.formats.train_config import TrainConfig

DATA = DataFacts(
    path="DATA",
    prepared=True,
    vocab_size=16_384,
    token_bytes=2 * 10**9,
    filesystem="ext4",
)
VARIED = (
    "memory_bytes_per_s",
    "launch_s",
    "load_s_per_row",
    "mean_document_tokens",
    "node_bytes_per_s",
)
Benefit = Callable[[Advice], float]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A rule, a situation in which it speaks, and one in which it is silent.

    It also has what following the rule delivers.
    """

    rule: str
    what: str
    speaks: TrainingContext
    silent: TrainingContext
    delivered: Benefit | None = None
    """The ratio of what the gain is of; None if the rule promises none."""

    def spoken(self) -> Advice | None:
        return next(
            (advice for advice in advise(self.speaks) if advice.rule == self.rule), None
        )

    def is_silent(self) -> bool:
        return all(advice.rule != self.rule for advice in advise(self.silent))


def scenarios(seed: int = 0) -> tuple[Scenario, ...]:
    """Return all scenarios, in worlds that differ by their seed.

    Other seeds than 0 make some parts a little faster and others slower.
    """
    draw = random.Random(seed)
    gpu, cluster = World(), World(nodes=8, ranks_per_node=2, node_bytes_per_s=2e11)
    if seed:
        gpu, cluster = (
            replace(
                world,
                **{
                    name: getattr(world, name) * draw.uniform(0.75, 1.33)
                    for name in VARIED
                },
            )
            for world in (gpu, cluster)
        )
    return (
        *_of_loader(gpu, cluster),
        *_of_batch(gpu),
        *_of_compute(gpu, cluster),
        *_of_network(gpu, cluster),
        *_of_spread(replace(cluster, nodes=64, node_bytes_per_s=2e10)),
        *_of_condition(gpu),
    )


# What is known in a world, put together for rules to look at.


def tuned(world: World, train: TrainConfig, **changes: object) -> TrainingContext:
    """After tuning with good settings; the profile then says something else."""
    profile = profile_of(world, train).with_train(settings_with(train, **changes))
    return TrainingContext(
        train=profile.train,
        profile=profile,
        bottleneck=bottleneck_of_profile(profile),
        data=DATA,
    )


def ran(
    world: World, train: TrainConfig, *, with_profile=False, noise_scale=None
) -> TrainingContext:
    run = run_of(
        world,
        train,
        noise_scale=noise_scale,
        first_step=1 if noise_scale is None else 5000,
    )
    profile = profile_of(world, train) if with_profile else None
    limit = bottleneck_of_run(
        run, None if profile is None else counters_of_profile(profile)
    )
    return TrainingContext(
        train=train, profile=profile, run=run, bottleneck=limit, data=DATA
    )


def _rates(world: World, train: TrainConfig) -> Benefit:
    """True tokens/s with the advice followed, to those without."""
    return lambda advice: (
        _speed(world, apply_changes(train, advice.changes)) / _speed(world, train)
    )


def _faster(
    slow: tuple[World, TrainConfig], fast: tuple[World, TrainConfig]
) -> Benefit:
    return lambda _: _speed(*fast) / _speed(*slow)


def _speed(world: World, train: TrainConfig) -> float:
    return step(world, train).tokens_per_s


def _trial(job: str, outcome: Outcome, **measured: object) -> FinishedTrial:
    trial = Trial(job=job, measured=measured, timeout_s=0.0)
    return FinishedTrial(
        trial=trial, outcome=outcome, seconds=10.0, label="", from_trial_log=True
    )


def _step_trial(gpu: World, train: TrainConfig, rows: int) -> FinishedTrial:
    """Return a trial of a micro-batch size that ran, with its peak."""
    peak = Measured(figures={"peak_bytes": memory_bytes(gpu, train, rows)})
    return _trial("step", peak, config={"micro_batch_size": rows})


def _of_loader(gpu: World, cluster: World) -> Iterator[Scenario]:
    raw = DataFacts(path="RAW", prepared=False, kinds=("elf",), raw_bytes=10**9)
    without_settings = TrainingContext(train=None, data=DATA)
    yield Scenario(
        "tokenise-ahead",
        "a directory of programs",
        replace(without_settings, data=raw),
        without_settings,
    )

    shared = replace(gpu, storage_rows_per_s=900.0)
    reading, staged = (
        ran(world, settings(world, data__num_workers=8), with_profile=True)
        for world in (shared, gpu)
    )
    what = "eight nodes read one shared file system"
    yield Scenario(
        "staging",
        what,
        reading,
        staged,
        _rates(shared, settings(shared, data__num_workers=8)),
    )

    slow = replace(gpu, load_s_per_row=2e-3)
    starved, many = (
        tuned(slow, settings(slow, data__num_workers=workers)) for workers in (1, 8)
    )
    enough = tuned(slow, settings(slow, data__num_workers=1), data__num_workers=8)
    what = "one worker for a device that could take several times as much"
    yield Scenario(
        "more-workers",
        what,
        starved,
        enough,
        _rates(slow, settings(slow, data__num_workers=1)),
    )

    def memory(advice: Advice) -> float:
        after, before = (
            2**30 + int(count) * 2**29
            for count in (advice.changes[0].new, advice.changes[0].old)
        )
        return after / before

    yield Scenario(
        "fewer-workers", "sixteen workers where two are enough", many, starved, memory
    )

    assert starved.profile is not None and starved.evidence.workers is not None
    workers = starved.evidence.workers.model_copy(update={"undecided_between": [2, 4]})
    undecided = replace(
        starved, profile=but(starved.profile, evidence={"workers": workers})
    )
    yield Scenario(
        "undecided-workers", "a sweep that noise did not let end", undecided, many
    )
    finding = UtilisationFinding(
        kind="idle at the upper bound",
        utilisation_share=0.6,
        claim="the GPU is busy only 60 % of the time",
        next_step="autotune advise",
    )
    workers = starved.evidence.workers.model_copy(
        update={"utilisation_finding": finding}
    )
    idle = replace(starved, profile=but(starved.profile, evidence={"workers": workers}))
    yield Scenario(
        "contradicted-utilisation", "a GPU that is idle without cause", idle, many
    )

    crowded = replace(gpu, storage_rows_per_s=600.0)
    eight = settings(crowded, data__num_workers=8)
    yield Scenario(
        "slow-loader",
        "storage that no number of workers makes faster",
        tuned(crowded, eight),
        tuned(gpu, settings(gpu)),
        _faster((crowded, eight), (gpu, eight)),
    )

    hindered, even = (
        replace(cluster, slow_loader=100.0),
        replace(cluster, load_s_per_row=2e-3),
    )
    good, what = (
        settings(cluster),
        "the loader of one rank of sixteen is a hundred times as slow as the others'",
    )
    silent = ran(even, settings(even, data__num_workers=1))
    yield Scenario(
        "starved-rank",
        what,
        ran(hindered, good),
        silent,
        _faster((hindered, good), (cluster, good)),
    )


def _of_batch(gpu: World) -> Iterator[Scenario]:
    small = settings(gpu, micro_batch_size=2, global_batch_size=256)
    large = settings(gpu, global_batch_size=4096)
    most = max_micro_batch_size(gpu, large)
    medium = tuned(gpu, large)
    yield Scenario(
        "beyond-memory",
        "more than was shown to fit",
        tuned(gpu, large, micro_batch_size=most + 5),
        medium,
    )
    yield Scenario(
        "no-headroom",
        "the most that fits, for a headroom of 3 %",
        tuned(gpu, large, micro_batch_size=most),
        medium,
    )
    cramped = replace(gpu, memory_bytes=8 * 10**9, launch_s=3e-5)
    limit = with_headroom(max_micro_batch_size(cramped, large), 0.03)
    cramped_train = settings_with(large, micro_batch_size=limit)
    yield Scenario(
        "memory-limits-size",
        "little memory for a device that launches slowly",
        tuned(cramped, cramped_train),
        tuned(cramped, settings_with(large, micro_batch_size=limit // 2)),
        lambda _: (
            _speed(cramped, settings_with(cramped_train, micro_batch_size=2 * limit))
            / _speed(cramped, cramped_train)
        ),
    )
    what = "two sequences on a device that wants dozens"
    yield Scenario("below-knee", what, tuned(gpu, small), medium, _rates(gpu, small))

    def memory(advice: Advice) -> float:
        return memory_bytes(gpu, large, advice.changes[0].new) / memory_bytes(
            gpu, large, most - 10
        )

    trials = tuple(
        _step_trial(gpu, large, rows) for rows in (8, 16, 32, 64, 128, 256, most - 10)
    )
    full = replace(tuned(gpu, large, micro_batch_size=most - 10), trials=trials)
    what = "as many as fit, though a few are as fast"
    yield Scenario(
        "beyond-knee", what, full, tuned(gpu, large, micro_batch_size=16), memory
    )

    def tokens(rows: int) -> float:
        """Return tokens for each bit that the loss of a quadratic falls by a step.

        The step has the best rate.
        """
        batch = rows * large.seq_length_tokens * worlds.FILL["packed"]
        # Everywhere 1 away from the minimum, with noise whose covariance has the trace
        # that makes the noise scale.
        noisy = 1 + np.random.default_rng(0).normal(0, np.sqrt(2e5 / batch), (400, 200))
        losses = [
            np.square(1 - rate * noisy).sum(axis=1).mean()
            for rate in np.linspace(0.01, 1.5, 150)
        ]
        return batch / float(200 - min(losses))

    yield Scenario(
        "beyond-noise-scale",
        "a noisy quadratic, descended with the best rate of each batch",
        ran(gpu, large, noise_scale=2e5),
        ran(gpu, large, noise_scale=4e6),
        lambda advice: tokens(advice.changes[0].new) / tokens(large.global_batch_size),
    )


def _of_compute(gpu: World, cluster: World) -> Iterator[Scenario]:
    good = settings(gpu)
    tuned_well, ran_well = tuned(gpu, good), ran(gpu, good)
    # With no evidence but that of the kernels, so that no other rule speaks.
    bare = but(profile_of(gpu, good), evidence={"workers": None, "network": None})
    ran_with_profile = replace(ran_well, profile=bare)
    for rule, what, changes in (
        ("padding", "every document in a sequence of its own", {"layout": "padded"}),
        (
            "dense-head",
            "logits everywhere",
            {"mlm_head": "dense", "last_layer": "dense"},
        ),
        (
            "dense-last-layer",
            "a last layer that is not needed",
            {"last_layer": "dense"},
        ),
        ("attention-dropout", "BERT's own dropout, packed", {"attention_dropout": 0.1}),
    ):
        train = settings(gpu, **changes)
        yield Scenario(rule, what, ran(gpu, train), ran_well, _rates(gpu, train))
    ran_padded = ran(gpu, settings(gpu, layout="padded"))
    yield Scenario("compute-bound", "good settings", ran_well, ran_padded)
    profiled_well = _profiled(ran_with_profile, kernels.near_bounds())
    profiled_far = _profiled(ran_with_profile, kernels.slow_layer_norms())
    yield Scenario(NOTHING, "a step near its kernels' bounds", profiled_well, ran_well)
    yield Scenario(
        NOT_JUDGED, "good settings, kernels not profiled", ran_well, profiled_well
    )
    yield Scenario(
        "far-kernel",
        "layer norms that take five times their bound",
        profiled_far,
        profiled_well,
        lambda _: _without_half_the_distance(kernels.slow_layer_norms()),
    )
    yield Scenario(
        "throughput-dip",
        "a larger size that is slower",
        _dipped(tuned_well),
        tuned_well,
    )
    exact, halved = (
        settings(gpu, precision="fp32"),
        settings(gpu, parallel__gradient_dtype="fp16"),
    )
    yield Scenario(
        "full-precision",
        "TF32 on an H100",
        tuned(gpu, exact),
        tuned_well,
        _rates(gpu, exact),
    )
    yield Scenario("half-precision", "gradients in fp16", ran(gpu, halved), ran_well)

    kept = settings(gpu, activation_checkpointing="full")
    compiled = _speed(gpu, settings(gpu, compile=True)) / _speed(gpu, good)
    for rule, setting, train, gain in (
        ("eager-layers", "compile", good, compiled),
        # Four passes instead of three.
        ("recomputation", "activation_checkpointing", kept, 4 / 3),
    ):
        speaking, silent = (
            replace(ran(gpu, train), predicted_gains={setting: predicted_gain})
            for predicted_gain in (gain, 1.01)
        )
        yield Scenario(
            rule,
            "a gain that was predicted",
            speaking,
            silent,
            lambda _, gain=gain: gain,
        )

    gappy, logged = replace(gpu, launch_s=1e-4), replace(gpu, between_s=0.2)
    slow, fused = replace(gpu, memory_bytes_per_s=6e11), settings(gpu, compile=True)
    yield Scenario(
        "launch-bound",
        "a host that launches slowly",
        tuned(gappy, good),
        tuned_well,
        _rates(gappy, good),
    )
    yield Scenario(
        "launch-bound",
        "every step logged at length",
        ran(logged, good),
        ran_well,
        _rates(logged, good),
    )
    what = "slow memory under fast products"
    yield Scenario(
        "memory-bound", what, tuned(slow, good), tuned(slow, fused), _rates(slow, good)
    )
    updating = replace(cluster, nodes=1, ranks_per_node=8, memory_bytes_per_s=2e11)
    few = settings(updating, micro_batch_size=4, global_batch_size=32)
    yield Scenario(
        "optimizer-bound",
        "small steps of eight ranks",
        ran(updating, few),
        ran_well,
        _rates(updating, few),
    )
    uneven = replace(
        gpu, ranks_per_node=32, seq_length=8192, mean_document_tokens=3000.0
    )
    odd, two = (settings(uneven, global_batch_size=rows) for rows in (33, 64))
    yield Scenario(
        "empty-rows",
        "33 sequences for 32 ranks",
        ran(uneven, odd),
        ran(uneven, two),
        _rates(uneven, odd),
    )
    assert ran_well.run is not None
    young = replace(
        ran_well,
        run=replace(ran_well.run, steps=ran_well.run.steps[:1]),
        bottleneck=None,
    )
    yield Scenario(TOO_LITTLE, "a run of one step", young, ran_well)

    big = World(
        layers=24,
        hidden=1024,
        ranks_per_node=8,
        memory_bytes=9 * 10**9,
        launch_s=1.2e-5,
    )
    roomy = replace(big, memory_bytes=94 * 10**9)
    train = settings(big, micro_batch_size=4, global_batch_size=32 * 8)

    def best(config: TrainConfig) -> float:
        rows = max_micro_batch_size(big, config)
        return _speed(
            big,
            config.model_copy(
                update={"micro_batch_size": rows, "global_batch_size": 8 * rows}
            ),
        )

    yield Scenario(
        "too-big-for-ddp",
        "a third of a billion weights on 9 GB",
        tuned(big, train),
        tuned(roomy, settings(roomy)),
        lambda advice: best(apply_changes(train, advice.changes)) / best(train),
    )


def _profiled(context: TrainingContext, step: StepKernels) -> TrainingContext:
    """Return the context with the kernels of its step."""
    assert context.profile is not None
    return replace(context, profile=kernels.with_kernels(context.profile, step))


def _without_half_the_distance(step: StepKernels) -> float:
    """Return the speedup if its farthest kernel comes half as near to its bound."""
    kernel = farthest_kernel(step.kernels)
    assert kernel is not None and kernel.bound_s is not None
    saved_s = (kernel.seconds - kernel.bound_s) / 2
    return step.step_s / (step.step_s - saved_s)


def _dipped(context: TrainingContext) -> TrainingContext:
    """Return the context with a dip of its throughput curve."""
    assert context.profile is not None and context.evidence.probe is not None
    dip = ThroughputDip(
        smaller_size=64,
        larger_size=256,
        ratio=0.91,
        kernels=[
            GrownKernel(
                name=kernels.LAYER_NORM_BACKWARD, ratio=4.5, added_s_per_token=3.5e-7
            )
        ],
    )
    probe = context.evidence.probe.model_copy(update={"dip": dip})
    return replace(context, profile=but(context.profile, evidence={"probe": probe}))


def _of_network(gpu: World, cluster: World) -> Iterator[Scenario]:
    slow, limping = (
        replace(cluster, node_bytes_per_s=5e9),
        replace(cluster, slow_rank=1.3),
    )
    train = settings(cluster)  # in all of these worlds
    halved = settings(cluster, parallel__gradient_dtype="bf16")
    good, limped = ran(cluster, train), ran(limping, train)
    what, gain = (
        "gradients that travel longer than backward",
        _faster((slow, train), (slow, halved)),
    )
    yield Scenario("network-bound", what, ran(slow, train), good, gain)
    what, gain = (
        "a rank that takes 1.3 times as long",
        _faster((limping, train), (cluster, train)),
    )
    yield Scenario("slow-rank", what, limped, good, gain)

    mixed = replace(cluster, uneven_rows=0.3)
    uneven = settings(mixed, layout="bucketed", attention_dropout=0.1)
    run = run_of(mixed, uneven)
    run = replace(
        run,
        steps=tuple(
            row.model_copy(update={"slowest_rank": 1 + row.step % 7})
            for row in run.steps
        ),
    )
    in_turns = TrainingContext(
        train=uneven, run=run, bottleneck=bottleneck_of_run(run), data=DATA
    )
    what = "every step another rank that has more to do"
    yield Scenario("uneven-ranks", what, in_turns, limped, _rates(mixed, uneven))

    linked, one_slow = (
        replace(cluster, node_bytes_per_s=bytes_per_s) for bytes_per_s in (1e10, 3e9)
    )

    def links(world: World) -> TrainingContext:
        neighbours = [linked.node_bytes_per_s] * world.nodes
        neighbours[2] = world.node_bytes_per_s
        figures = {
            "all": [],
            "within": [],
            "between": [],
            "neighbours_bytes_per_s": neighbours,
            "matmul_flops_per_s": [],
            "nodes": world.nodes,
            "ranks_per_node": 2,
            "backend": "nccl",
            "transport": "tcp",
            "interface": None,
            "interface_bytes_per_s": None,
        }
        return replace(
            ran(world, train), trials=(_trial("links", Measured(figures=figures)),)
        )

    what, gain = (
        "one link with a third of the others' speed",
        _faster((one_slow, train), (linked, train)),
    )
    yield Scenario("slow-link", what, links(one_slow), links(linked), gain)

    def bucketed(advice: Advice) -> float:
        cap = {change.key: change for change in advice.changes}[
            "parallel.bucket_cap_mib"
        ]
        return _simulated_step_s(cap.old, seed=1) / _simulated_step_s(cap.new, seed=2)

    small, large = (_exchanges(gpu, cap_mib) for cap_mib in (5, 100))
    yield Scenario(
        "gradient-sync",
        "default buckets where others were measured to be faster",
        small,
        large,
        bucketed,
    )


def _of_spread(world: World) -> Iterator[Scenario]:
    def train(batch: int) -> TrainConfig:
        return settings(
            world, micro_batch_size=64, global_batch_size=batch * 2 * 64 * 32
        )

    def efficiency(nodes: int, batch: int = 1) -> float:
        speed, alone = (
            _speed(replace(world, nodes=count), train(batch)) for count in (nodes, 1)
        )
        return speed / nodes / alone

    useful = max(count for count in range(1, 65) if efficiency(count) >= 0.9)

    def spread(nodes: int, twice: float = 0.0) -> TrainingContext:
        intended = IntendedNodes(
            nodes=nodes,
            efficiency=Interval(value=efficiency(nodes)),
            useful_nodes=useful,
            useful_efficiency=efficiency(useful),
            tokens_per_rank=64 * 32 * 512 * worlds.FILL["packed"] / nodes,
            least_tokens_per_rank=60_000.0,
            twice_the_batch_efficiency=twice,
            source="simulated",
        )
        return replace(ran(world, train(1)), spread=intended)

    what, hours = (
        "64 nodes for a batch that keeps a few busy",
        efficiency(64) / efficiency(useful),
    )
    yield Scenario("too-many-nodes", what, spread(64), spread(1), lambda _: hours)
    growing, gain = (
        spread(64, twice=efficiency(64, batch=2)),
        _faster((world, train(1)), (world, train(2))),
    )
    yield Scenario(
        "below-t-min",
        "the same, with a batch that may grow",
        growing,
        spread(1, twice=1.0),
        gain,
    )


def _simulated_step_s(cap_mib: int, seed: int) -> float:
    """Return the step time of a cluster that is simulated bucket by bucket.

    Its latency is high, which small buckets pay more often.
    """
    cluster = SimulatedCluster(
        name="distant",
        ranks_per_node=2,
        flops_per_s=2e14,
        most_micro_batch_tokens=2**17,
        inter_bytes_per_s=1e10,
        inter_latency_s=4e-4,
        intra_bytes_per_s=2e11,
        intra_latency_s=1e-5,
        micro_batch_extra_s=1e-3,
        update_elements_per_s=5e10,
        jitter_share=0.01,
        slowdown_share=0.05,
    )
    simulator = Simulator(
        SimulatedModel(name="base", layers=12, hidden=768, intermediate=3072),
        cluster,
        seed,
    )
    recipe = Recipe(
        nodes=16, global_tokens=2**20, micro_batches=1, bucket_cap_bytes=cap_mib * 2**20
    )
    return simulator.step_s(recipe, steps=20)


def _exchanges(gpu: World, cap_mib: int) -> TrainingContext:
    """Buckets of several sizes were measured, and the profile has one of them."""
    context = tuned(gpu, settings(gpu, parallel__bucket_cap_mib=cap_mib))
    assert context.profile is not None
    rows = []
    for cap in (25, 5, 100):
        step_s = _simulated_step_s(cap, seed=0)
        rounds = sorted(
            _simulated_step_s(25, seed) / _simulated_step_s(cap, seed)
            for seed in (3, 4, 5)
        )
        against = {
            "ratio_to_default": rounds[1],
            "ratio_low": rounds[0] * 0.98,
            "ratio_high": rounds[2] * 1.02,
        }
        row = GradientSyncRow(
            strategy="ddp",
            gradient_dtype="fp32",
            bucket_cap_mib=cap,
            gradient_accumulation_steps=1,
            micro_batch_size=64,
            step_s=step_s,
            steps=20,
            tokens_per_s=2**20 / step_s,
            communication_share=0.05,
            outcome="ran",
            **({} if cap == 25 else against),
        )
        rows.append(row)
    network = NetworkEvidence(
        nodes=2,
        ranks_per_node=2,
        backend="nccl",
        transport="tcp",
        links=[],
        matmul_flops_per_s=[1.0, 1.0],
        default_micro_batch_size=64,
        compute=ComputeEvidence(
            micro_batch_size=64,
            micro_batch_s=0.9 * rows[0].step_s,
            fixed_s=0.0,
            optimizer_step_s=0.001,
            forward_share=0.33,
            jitter_share=0.01,
            slowdown_share=0.05,
            gradient_elements=[85_000_000],
            gradient_ready_shares=[1.0],
        ),
        gradient_syncs=rows,
        choice="",
        windows=3,
        seconds=1.0,
    )
    return replace(context, profile=but(context.profile, evidence={"network": network}))


def _of_condition(gpu: World) -> Iterator[Scenario]:
    good = settings(gpu)
    context = tuned(gpu, good)
    slowed = "GPU 0 was slowed down: hw_thermal in 4 of 9 samples, at up to 91 °C"
    used = "another process used GPU 0: 2 processes in 3 of 9 samples"
    void = (_trial("step", Contaminated(detail=detail)) for detail in (slowed, used))
    hot, shared = (
        replace(context, trials=(trial, _step_trial(gpu, good, 8))) for trial in void
    )
    yield Scenario("thermal", "a GPU that is too hot", hot, shared)
    yield Scenario("other-gpu-users", "a neighbour on the GPU", shared, hot)
    lazy = replace(gpu, reached={"bf16": 0.1, "tf32": 0.12, "fp32": 0.5})
    what = "98 % utilisation at a tenth of the peak"
    yield Scenario(
        "utilisation", what, ran(lazy, good, with_profile=True), ran(gpu, good)
    )
    yield Scenario(
        "edited", "a profile that was edited", replace(context, intact=False), context
    )
    lacking = NotJudged(
        part="loader workers",
        reason="no sweep",
        command="autotune workers",
        is_basic=True,
    )
    unknown = replace(context, not_judged=(lacking,))
    yield Scenario("not-measured", "no sweep of workers", unknown, context)
    library = TrainingContext(train=None, profile=own_profile())
    untried = (Setting(name="torch_compile", values=(False, True)),)
    yield Scenario(
        "untried-settings",
        "a library that can compile the model",
        replace(library, untried=untried),
        library,
    )
