"""``python -m benchmarks.prepare``: whether two processes prepare a dataset nearly twice as fast as one.

The whole command is timed, starting the workers included, on this machine's own programs, in pairs that alternate. Both
must come to the same bytes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from autotune.show.tables import text_table
from autotune.store import json_rows, write_atomically
from benchmarks.bars import EXIT_UNMEASURED, Bar, exit_code, lines

SOURCE = "elf:/usr/bin"
PAIRS = 2
RATIO_BAR = 1.7
TIMEOUT_S = 1800.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prepare", description="Time data prepare.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--source", default=SOURCE, help=f"what to prepare; default {SOURCE}")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="runs with either number of processes")
    options = parser.parse_args(arguments)
    if len(os.sched_getaffinity(0)) < 2:
        sys.stderr.write("error: two processes need two processors\n")
        return EXIT_UNMEASURED
    seconds: dict[int, list[float]] = {1: [], 2: []}
    hashes = set()
    with tempfile.TemporaryDirectory(prefix="prepare-") as place:
        for number in range(options.pairs):
            # The order alternates, so that a drift of the machine's speed falls on both.
            for workers in (1, 2) if number % 2 == 0 else (2, 1):
                run_s, dataset_hash = _run(options.source, Path(place) / "data", workers)
                seconds[workers].append(run_s)
                hashes.add(dataset_hash)
                sys.stderr.write(f"{workers} processes: {run_s:.1f} s\n")
    if len(hashes) != 1:
        sys.stderr.write(f"error: {len(hashes)} different datasets\n")
        return EXIT_UNMEASURED
    ratio = statistics.median(seconds[1]) / statistics.median(seconds[2])
    bars = [Bar(name="prepare_two_processes_ratio", figure=ratio, unit="ratio", bar=RATIO_BAR, direction=">=")]
    if options.json:
        content = {"bars": [bar.to_json() for bar in bars], "source": options.source, "seconds": seconds}
        write_atomically(options.json, json_rows(content))
    rows = [[str(workers), f"{statistics.median(times):.1f} s"] for workers, times in seconds.items()]
    print(text_table(["processes", f"median of {options.pairs}"], rows))
    print(lines(bars))
    return exit_code(bars)


def _run(source: str, out: Path, workers: int) -> tuple[float, str]:
    command = [sys.executable, "-m", "autotune", "data", "prepare", source, "--out", str(out)]
    started_s = time.perf_counter()
    done = subprocess.run(
        [*command, "--workers", str(workers), "--json"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    run_s = time.perf_counter() - started_s
    if done.returncode:
        raise SystemExit(f"preparing ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    shutil.rmtree(out)
    return run_s, str(json.loads(done.stdout)["dataset_hash"])


if __name__ == "__main__":
    sys.exit(main())
