"""What follows a tuning of one node: the network between the nodes of this job, for each of its profiles."""

from dataclasses import replace
from pathlib import Path

from autotune.core.tuning import TuningResult
from autotune.measure.clock import SystemClock
from autotune.search.profiles import probed_here, read_profile
from autotune.search.workers import SweepRequest
from autotune.tuning.bench import open_bench
from autotune.tuning.network import tune_network
from autotune.tuning.report import build_report
from autotune.tuning.sweeps import compare_recipes
from autotune.tuning.together import nodes_here
from autotune.tuning.tune import next_steps
from trainer.dataset import read_manifest
from trainer.schema import read_json

BASELINE_MINUTES = 2.0
"""At most."""


def measure_between_nodes(found_by: Path, request: SweepRequest) -> TuningResult:
    """Measure the network for each profile, what it is worth if that was known, and write the report again.

    Args:
        found_by: What the tuning left: profiles, the report, and whether it measured what settings are worth.
        request: The dataset, and the time for the network of each profile.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    found, manifest = read_json(found_by), read_manifest(request.data)
    paths, waited_s = [Path(one) for one in found["profiles"]], 0.0
    for path in paths:
        stored = read_profile(path)
        ranks = probed_here(stored, refusals=[]).local_ranks
        waited_s += tune_network(
            stored, manifest, data=request.data, reports=request.reports, minutes=request.minutes, nodes=nodes_here(),
            ranks=ranks, trial_timeout_s=request.trial_timeout_s,
        )[1]  # fmt: skip
        if not found["with_baseline"]:
            continue
        stored = read_profile(path)  # another exchange, and what the old settings were worth is no longer said
        with open_bench(stored.profile.train.device, request.data) as bench:
            worth = replace(request, minutes=min(BASELINE_MINUTES, request.minutes))
            compare_recipes(bench, stored, probed_here(stored, refusals=[]), worth, manifest)
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
