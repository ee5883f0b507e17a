"""``python -m benchmarks.probe``: trials and seconds to the largest micro-batch.

Six cases on a CPU whose memory is limited for real. Ours predicts by tracing, tries,
and verifies on both sides, every trial in its own process; seconds include the tracing.
The references are the tools that people use. They search in one process, as they do:
Lightning's ``BatchSizeFinder`` and accelerate's ``find_executable_batch_size``, on the
same step. Imports are not counted. An answer is exact if two further processes run it
and two run out of memory with one sequence more.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from autotune.base.clock import SystemClock
from autotune.base.tables import text_table
from autotune.memory.decide.batch_search import bracket
from autotune.memory.decide.overheads import overheads_on_cpu
from autotune.memory.size_search import SizeSearch
from autotune.subjects.mlm.memory.probe import FIT_STEPS, MlmProbe, MlmProbeRequest
from autotune.trials.fork_server import ForkServerMachine
from autotune.trials.runner import TrialRunner
from autotune.trials.trial_log import TrialLog
from autotune.trials.values import Trial
from benchmarks.bars import Bar, finish, measuring, parser, run
from benchmarks.finders import (
    Case,
    Found,
    cases,
    find_with_accelerate,
    find_with_lightning,
)
from testbed.corpora import synthetic_manifest
from trainer.formats.train_config import TrainConfig

TRIALS_BAR = 2.5
TIME_BAR = 1.0
MAX_MICRO_BATCH_SIZE = 8192
TRIAL_TIMEOUT_S = 300.0
PROOFS = 2
"""Further processes that must agree with an answer before it counts as exact."""

RIVALS: dict[str, Callable[[Case], Found]] = {
    "lightning": partial(find_with_lightning, margin=0.05),
    "lightning_without_margin": partial(find_with_lightning, margin=0.0),
    "accelerate": find_with_accelerate,
}


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("probe", (__doc__ or "").splitlines()[0])
    options_of.add_argument(
        "--cases", type=int, default=None, metavar="N", help="only the first N cases"
    )
    options = options_of.parse_args(arguments)
    import accelerate  # noqa: F401
    import lightning  # noqa: F401

    results = {case.name: measure(case) for case in cases()[: options.cases]}
    bars = make_bars(results)
    return finish(options.json, bars, {"cases": results}, _table(results))


def measure(case: Case) -> dict[str, Any]:
    """Run all finders on a case, one after the other, and check if ours is exact."""
    with ForkServerMachine() as machine:
        machine.start()
        job: Any = "testbed.failing_job"
        # It has forked once.
        machine.run(Trial(job=job, measured={"fault": "none"}, timeout_s=60))
        probe = _probe(case)
        ours, search = _ours(probe, machine)
        sys.stderr.write(f"{case.name}: ours {ours}\n")
        exact = ours["rows"] is not None and _is_exact(probe, machine, ours["rows"])
    rivals: dict[str, Any] = {}
    for name, find in RIVALS.items():
        rivals[name] = asdict(find(case))
        sys.stderr.write(f"{case.name}: {name} {rivals[name]}\n")
    return {
        "memory_budget_bytes": case.memory_budget_bytes,
        "ours": ours | {"exact": exact, "tried": search},
        "rivals": rivals,
    }


def _ours(
    probe: MlmProbe, machine: ForkServerMachine
) -> tuple[dict[str, Any], list[Any]]:
    with tempfile.TemporaryDirectory(prefix="probe-") as place:
        runner = TrialRunner(
            machine=machine,
            trial_log=TrialLog(Path(place), "bench"),
            site="bench",
            clock=SystemClock(),
        )
        search = SizeSearch(
            probe=probe.size_probe(),
            runner=runner,
            host_available_bytes=psutil.virtual_memory().available,
        )
        started_s = time.perf_counter()
        search.predict()
        traced_s = time.perf_counter() - started_s
        search.find()
        seconds = time.perf_counter() - started_s
    rows = bracket(search.tried).feasible_max or None
    ours = {
        "rows": rows,
        "trials": len(search.tried),
        "refused": sum(trial.fits is False for trial in search.tried),
        "seconds": seconds,
        "tracing_s": traced_s,
    }
    return ours, [
        [trial.micro_batch_size, trial.fits, trial.peak_bytes] for trial in search.tried
    ]


def _is_exact(probe: MlmProbe, machine: ForkServerMachine, rows: int) -> bool:
    outcomes = {
        size: [
            machine.run(
                probe.size_probe().step_trial(
                    size, FIT_STEPS, probe.memory_budget_bytes
                )
            ).kind
            for _ in range(PROOFS)
        ]
        for size in (rows, rows + 1)
    }
    return set(outcomes[rows]) == {"measured"} and set(outcomes[rows + 1]) == {
        "out_of_memory"
    }


def _probe(case: Case) -> MlmProbe:
    config = TrainConfig.model_validate(
        {"precision": "fp32", **case.config, "layout": "padded", "device": "cpu"}
    )
    request = MlmProbeRequest(
        config=config,
        data=Path(),
        reports=Path(),
        accumulate=False,
        headroom_share=0.0,
        max_size=MAX_MICRO_BATCH_SIZE,
        trial_timeout_s=TRIAL_TIMEOUT_S,
    )
    return MlmProbe(
        request=request,
        config=config,
        manifest=synthetic_manifest(case.vocab_size),
        memory_budget_bytes=case.memory_budget_bytes,
        overheads=overheads_on_cpu(),
    )


def make_bars(results: Mapping[str, Any]) -> list[Bar]:
    """Return trials and seconds of each reference over ours.

    They are medians over the cases. Answers that were not exact are counted as well.
    """
    bars: list[Bar] = []
    for name in RIVALS:
        for figure, bar in (("trials", TRIALS_BAR), ("seconds", TIME_BAR)):
            ratios = [
                result["rivals"][name][figure] / result["ours"][figure]
                for result in results.values()
                if result["rivals"][name]["trials"]
            ]
            bars.append(
                Bar(
                    name=f"probe_{figure}_against_{name}_ratio",
                    figure=statistics.median(ratios) if ratios else None,
                    unit="ratio",
                    bar=bar,
                    direction=">=",
                )
            )
    inexact = sum(not result["ours"]["exact"] for result in results.values())
    bars.append(
        Bar(
            name="probe_inexact_count",
            figure=inexact,
            unit="count",
            bar=0,
            direction="<=",
        )
    )
    return bars


def _table(results: Mapping[str, Any]) -> str:
    rows: list[list[str | None]] = []
    for case, result in results.items():
        for name, figures in {"ours": result["ours"], **result["rivals"]}.items():
            right = (
                figures["rows"] == result["ours"]["rows"] and result["ours"]["exact"]
            )
            rows.append(
                [
                    case,
                    name,
                    None if figures["rows"] is None else str(figures["rows"]),
                    "exact" if right else "not exact",
                    str(figures["trials"]),
                    str(figures["refused"]),
                    f"{figures['seconds']:.1f} s",
                ]
            )
    return text_table(
        ("case", "finder", "rows", "", "trials", "refused", "time"),
        rows,
        align="llrlrrr",
    )


if __name__ == "__main__":
    run(main)
