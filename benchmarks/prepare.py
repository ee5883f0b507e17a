"""``python -m benchmarks.prepare``: the speedup of a preparation by two processes.

The whole command is timed, starting the workers included, on this machine's own
programs, in pairs that alternate. Both must come to the same bytes.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from autotune.base.tables import text_table
from benchmarks.bars import Bar, finish, measuring, parser, run
from testbed.programs import CannotMeasure, run_program

SOURCE = "elf:/usr/bin"
PAIRS = 2
RATIO_BAR = 1.7
TIMEOUT_S = 1800.0


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("prepare", "Time data prepare.")
    options_of.add_argument(
        "--source", default=SOURCE, help=f"what to prepare; default {SOURCE}"
    )
    options_of.add_argument(
        "--pairs", type=int, default=PAIRS, help="runs with either number of processes"
    )
    options = options_of.parse_args(arguments)
    if len(os.sched_getaffinity(0)) < 2:
        raise CannotMeasure("two processes need two processors")
    seconds: dict[int, list[float]] = {1: [], 2: []}
    hashes = set()
    with tempfile.TemporaryDirectory(prefix="prepare-") as place:
        for number in range(options.pairs):
            # The order alternates, so that a drift of the machine's speed falls on
            # both.
            for workers in (1, 2) if number % 2 == 0 else (2, 1):
                run_s, dataset_hash = _run(
                    options.source, Path(place) / "data", workers
                )
                seconds[workers].append(run_s)
                hashes.add(dataset_hash)
                sys.stderr.write(f"{workers} processes: {run_s:.1f} s\n")
    if len(hashes) != 1:
        raise CannotMeasure(f"{len(hashes)} different datasets")
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[2])
    bars = [
        Bar(
            name="prepare_two_processes_ratio",
            figure=ratio,
            unit="ratio",
            bar=RATIO_BAR,
            direction=">=",
        )
    ]
    rows = [
        [str(workers), f"{statistics.median(times):.1f} s"]
        for workers, times in seconds.items()
    ]
    shown = text_table(["processes", f"median of {options.pairs}"], rows)
    return finish(
        options.json, bars, {"source": options.source, "seconds": seconds}, shown
    )


def _run(source: str, out: Path, workers: int) -> tuple[float, str]:
    command = [
        sys.executable,
        "-m",
        "autotune",
        "data",
        "prepare",
        source,
        "--out",
        str(out),
    ]
    started_s = time.perf_counter()
    answer = run_program(
        [*command, "--workers", str(workers), "--json"], timeout_s=TIMEOUT_S
    )
    run_s = time.perf_counter() - started_s
    shutil.rmtree(out)
    return run_s, str(json.loads(answer)["dataset_hash"])


if __name__ == "__main__":
    run(main)
