"""For each rule of advice a training in which following it is worth what was said, and one in which it is silent.

All of these are simulated; ``benchmarks.advice`` follows some of the rules for real, by training on this machine. What
worlds do is written down in ``benchmarks.simulated_training``. Where a rule's own arithmetic is all there is to a
world, as in the memory of a foreach optimizer, ``benchmarks.sizes`` measures it.
"""

import random
from dataclasses import replace

from autotune.core.advice import Advice
from autotune.decide.advice import advise
from benchmarks.scenarios.batch import of_batch
from benchmarks.scenarios.compute import of_compute
from benchmarks.scenarios.condition import of_condition
from benchmarks.scenarios.loader import of_loader
from benchmarks.scenarios.network import of_network
from benchmarks.scenarios.situations import Scenario
from benchmarks.simulated_training import World


def scenarios(seed: int = 0) -> tuple[Scenario, ...]:
    """All of them, in worlds that differ by their seed."""
    gpu, cluster = worlds(seed)
    return (
        *of_loader(gpu, cluster),
        *of_batch(gpu),
        *of_compute(gpu, cluster),
        *of_network(gpu, cluster),
        *of_condition(gpu),
    )


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


def spoken(scenario: Scenario) -> Advice | None:
    """What the rule says where it should speak."""
    return next((one for one in advise(scenario.speaks()) if one.rule == scenario.rule), None)


def is_silent(scenario: Scenario) -> bool:
    """Whether it says nothing where it should not."""
    return all(one.rule != scenario.rule for one in advise(scenario.silent()))
