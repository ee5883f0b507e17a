"""Scenarios of what a rank computes, and of what its device waits for."""

from dataclasses import replace

from autotune.core.advice import Advice
from autotune.decide.advice import NOTHING, TOO_LITTLE, Foreign, Situation
from autotune.decide.advice.apply import with_changes
from benchmarks.scenarios.situations import Benefit, Scenario, ran, rates, step_trial, tuned
from benchmarks.simulated_records import profile_of
from benchmarks.simulated_training import World, memory_bytes, most_rows, settings, step
from trainer.config import TrainConfig


def of_compute(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    """Formats, layouts, heads, launches, memory, and nothing at all."""
    padded, dense = settings(gpu, layout="padded"), settings(gpu, head="dense", last_layer="all")
    whole, exact = settings(gpu, last_layer="all"), settings(gpu, precision="fp32")
    dropping = settings(gpu, attention_dropout=0.1)
    gappy = replace(gpu, launch_s=1e-4)
    slow_memory, fused = replace(gpu, memory_bytes_per_s=6e11), settings(gpu, compile_layers=True)
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
    tighter = replace(full, trials=(step_trial(tight, settings(tight), most),))

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
            delivered=rates(slow_memory, good), silent=lambda: tuned(slow_memory, fused),
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


def _young(now: Situation) -> Situation:
    assert now.run is not None
    return replace(now, run=replace(now.run, steps=now.run.steps[:1]), bottleneck=None)
