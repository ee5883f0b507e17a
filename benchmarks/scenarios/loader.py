"""Scenarios of data and loader workers."""

from dataclasses import replace

from autotune.core.advice import Advice
from autotune.decide.advice import DataFacts, Situation
from benchmarks.scenarios.situations import DATA, Scenario, ran, rates, tuned, with_evidence
from benchmarks.simulated_training import World, settings, step


def of_loader(gpu: World, cluster: World) -> tuple[Scenario, ...]:
    """Raw files, shared disks, and too few or too many workers."""
    slow = replace(gpu, load_s_per_row=2e-3)
    starved = settings(slow, data__loader_workers=1)
    shared = replace(gpu, staged=False, storage_rows_per_s=900.0)
    reading = settings(shared, data__loader_workers=8)
    many = settings(slow, data__loader_workers=8)
    good = settings(cluster)
    hindered = replace(cluster, slow_loader=100.0)
    even = replace(cluster, load_s_per_row=2e-3)

    def memory(advice: Advice) -> float:
        after, before = (2**30 + int(count) * 2**29 for count in (advice.changes[0].new, advice.changes[0].old))
        return after / before

    def without_slow_loader(advice: Advice) -> float:
        return step(cluster, good).real_tokens_per_s / step(hindered, good).real_tokens_per_s

    def undecided() -> Situation:
        now = tuned(slow, starved)
        assert now.profile is not None and now.workers is not None
        workers = now.workers.model_copy(update={"undecided_between": [2, 4]})
        return replace(now, profile=with_evidence(now.profile, workers=workers))

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
            rule="starved-rank", what="the loader of one rank of sixteen is a hundred times as slow as the others'",
            speaks=lambda: ran(hindered, good), delivered=without_slow_loader,
            silent=lambda: ran(even, settings(even, data__loader_workers=1)),
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
