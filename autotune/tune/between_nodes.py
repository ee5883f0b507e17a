"""The network between nodes, which a second job measures after the tuning."""

from dataclasses import replace
from pathlib import Path

from autotune.base.clock import SystemClock
from autotune.baseline.stage import compare_recipes
from autotune.confirm.decide import confirm_window_s, training_s
from autotune.confirm.stage import confirm_profile
from autotune.confirm.subject_training import training_of
from autotune.network.stage import measure_network, nodes_here
from autotune.profiles.store import read_profile
from autotune.report.stage import build_report
from autotune.subjects.bench import open_subject
from autotune.subjects.registry import profile_subject
from autotune.trials.sweep_request import SweepRequest
from autotune.tune.next_steps import next_steps
from autotune.tune.values import TuningResult
from trainer.formats.tables import read_json

REPEATED_MINUTES = 2.0
"""Longest repeated phase after the network between nodes was measured, in minutes."""


def measure_between_nodes(found_by: Path, request: SweepRequest) -> TuningResult:
    """Measure the network of each profile in ``found_by``, and report.

    It takes the requested time. Phases that measure the tuned settings are repeated if
    the network changed these.
    """
    clock, waited_s = SystemClock(), 0.0
    began_s = clock.monotonic_s()
    found = read_json(found_by)
    paths = [Path(path) for path in found["profiles"]]
    for path in paths:
        waited_s += measure_network(read_profile(path), request, nodes_here())[1]
        stored = read_profile(path)
        evidence = stored.profile.evidence
        dropped = [
            name for name in found["repeated"] if getattr(evidence, name) is None
        ]
        if not dropped:
            continue
        short = replace(request, budget_s=min(60 * REPEATED_MINUTES, request.budget_s))
        with open_subject(
            stored.profile.device,
            profile_subject(stored.profile, request.data),
            request.data,
        ) as bench:
            if "confirm" in dropped:
                confirm_profile(
                    training_of(
                        bench,
                        stored,
                        replace(short, window_s=confirm_window_s(short.window_s)),
                    ),
                    budget_s=short.budget_s,
                    training_s=training_s(short.budget_s, models=1),
                )
                stored = read_profile(path)
            if "baseline" in dropped:
                compare_recipes(bench, stored, short)
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
