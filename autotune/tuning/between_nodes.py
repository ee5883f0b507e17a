"""What follows a tuning of one node: the network between the nodes of this job, for each of its profiles."""

from dataclasses import replace
from pathlib import Path

from autotune.core.tuning import TuningResult
from autotune.measure.clock import SystemClock
from autotune.search.profiles import read_profile
from autotune.search.workers import SweepRequest
from autotune.tuning.bench import open_bench
from autotune.tuning.network import tune_network
from autotune.tuning.report import build_report
from autotune.tuning.sweeps import compare_recipes
from autotune.tuning.together import nodes_here
from autotune.tuning.tune import next_steps
from trainer.schema import read_json

BASELINE_MINUTES = 2.0
"""At most."""


def measure_between_nodes(found_by: Path, request: SweepRequest) -> TuningResult:
    """Measure the network for each profile, what it is worth if that was known, and write the report again.

    Args:
        found_by: What the tuning left: profiles, the report, and whether it measured what settings are worth.
        request: The dataset, and the time for the network of each profile.
    """
    clock, waited_s = SystemClock(), 0.0
    began_s = clock.monotonic_s()
    found = read_json(found_by)
    paths = [Path(one) for one in found["profiles"]]
    for path in paths:
        waited_s += tune_network(read_profile(path), request, nodes_here())[1]
        if not found["with_baseline"]:
            continue
        stored = read_profile(path)  # another exchange, and what the old settings were worth is no longer said
        with open_bench(stored.profile.train.device, request.data) as bench:
            compare_recipes(bench, stored, replace(request, minutes=min(BASELINE_MINUTES, request.minutes)))
        waited_s += bench.server.waited_s
    if found["report"] is not None:
        build_report(paths, request.reports, Path(found["report"]), data=request.data)
    return TuningResult(
        profiles=tuple(found["profiles"]),
        report=found["report"],
        stages=(),
        seconds=round(clock.monotonic_s() - began_s, 3),
        seconds_in_children=round(waited_s, 3),
        next_steps=next_steps(paths, nodes=nodes_here()),
    )
