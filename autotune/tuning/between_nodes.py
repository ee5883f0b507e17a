"""What follows a tuning of one node: the network between the nodes of this job, for each of its profiles."""

from pathlib import Path

from autotune.core.tuning import TuningResult
from autotune.measure.clock import SystemClock
from autotune.search.profiles import probed_here, read_profile
from autotune.tuning.baseline import BaselineAsked, compare_recipes
from autotune.tuning.bench import open_bench
from autotune.tuning.network import tune_network
from autotune.tuning.report import build_report
from autotune.tuning.together import nodes_here
from autotune.tuning.tune import next_steps
from trainer.dataset import read_manifest
from trainer.schema import read_json

BASELINE_MINUTES = 2.0
"""At most."""


def measure_between_nodes(
    found_by: Path, *, data: Path, reports: Path, minutes: float, trial_timeout_s: float
) -> TuningResult:
    """Measure the network for each profile, what it is worth if that was known, and write the report again.

    ``found_by`` is what the tuning left: profiles, the report, and whether it measured what settings are worth.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    found, manifest = read_json(found_by), read_manifest(data)
    paths, waited_s = [Path(one) for one in found["profiles"]], 0.0
    for path in paths:
        stored = read_profile(path)
        ranks = probed_here(stored, refusals=[]).local_ranks
        waited_s += tune_network(
            stored, manifest, data=data, reports=reports, minutes=minutes, nodes=nodes_here(), ranks=ranks,
            trial_timeout_s=trial_timeout_s,
        )[1]  # fmt: skip
        if not found["with_baseline"]:
            continue
        stored = read_profile(path)  # another exchange, and what the old settings were worth is no longer said
        with open_bench(stored.profile.train.device, data) as bench:
            worth = BaselineAsked(
                data=data, reports=reports, minutes=min(BASELINE_MINUTES, minutes), trial_timeout_s=trial_timeout_s
            )
            compare_recipes(bench, stored, probed_here(stored, refusals=[]), worth, manifest)
        waited_s += bench.server.waited_s
    if found["report"] is not None:
        build_report(paths, reports, Path(found["report"]), data=data)
    return TuningResult(
        profiles=tuple(found["profiles"]),
        report=found["report"],
        stages=(),
        seconds=round(clock.monotonic_s() - began_s, 3),
        seconds_in_children=round(waited_s, 3),
        next_steps=next_steps(paths, nodes=nodes_here()),
    )
