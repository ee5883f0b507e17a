"""``python -m benchmarks.cli``: the time of ``autotune --help``, and its imports.

The median CPU time of five whole processes, after one that warms the file cache. A
shell completes and helps without a noticeable wait if it stays below 0.15 s; CPU time
is the same on a busy machine. The program that answers must not import torch: that
alone takes seconds.
"""

import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

from autotune.base.tables import text_table
from benchmarks.bars import Bar, finish, measuring, parser, run
from testbed.programs import CannotMeasure, run_program

RUNS = 5
HELP_BAR_CPU_S = 0.15
TIMEOUT_S = 60.0
HEAVY = ("torch", "transformers", "optuna", "pydantic", "numpy")
"""Each takes longer to import than the whole answer may."""

COMMAND = (sys.executable, "-m", "autotune", "--help")


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("cli", "Time `autotune --help`.")
    options = options_of.parse_args(arguments)
    heavy = heavy_imports(COMMAND)
    runs_cpu_s = [_cpu_seconds(COMMAND) for _ in range(1 + RUNS)][1:]
    bars = make_bars(runs_cpu_s, heavy)
    return finish(
        options.json,
        bars,
        {"runs_cpu_s": runs_cpu_s, "heavy_imports": heavy},
        _table(runs_cpu_s, heavy),
    )


def make_bars(runs_cpu_s: Sequence[float], heavy: Sequence[str]) -> list[Bar]:
    """Return the two bars of the command line."""
    return [
        Bar(
            name="cli_help_cpu_s",
            figure=statistics.median(runs_cpu_s),
            unit="s",
            bar=HELP_BAR_CPU_S,
            direction="<=",
        ),
        Bar(
            name="cli_help_heavy_imports_count",
            figure=len(heavy),
            unit="count",
            bar=0,
            direction="<=",
        ),
    ]


def heavy_imports(command: Sequence[str]) -> list[str]:
    """Return the heavy libraries that a Python command imports.

    Args:
        command: The interpreter, then its arguments.

    Raises:
        CannotMeasure: If the command fails or hangs.
    """
    # -X importtime names every import on standard error, whoever asked for it.
    import_times = _run([command[0], "-X", "importtime", *command[1:]])
    names = {
        line.rpartition("|")[2].strip()
        for line in import_times.splitlines()
        if line.startswith("import time:")
    }
    if "autotune" not in names and "json" not in names:
        raise CannotMeasure("this Python does not report its imports")
    return [name for name in HEAVY if name in names]


def _cpu_seconds(command: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user_s = after.ru_utime - before.ru_utime
    return user_s + after.ru_stime - before.ru_stime


def _run(command: Sequence[str]) -> str:
    """Run it; what it says on standard error is among what it prints."""
    environment = os.environ | {"NO_COLOR": "1"}
    return run_program(
        command, timeout_s=TIMEOUT_S, env=environment, stderr=subprocess.STDOUT
    )


def _table(runs_cpu_s: Sequence[float], heavy: Sequence[str]) -> str:
    rows = [
        ["autotune --help, median CPU time", f"{statistics.median(runs_cpu_s):.3f} s"],
        ["fastest and slowest", f"{min(runs_cpu_s):.3f} s, {max(runs_cpu_s):.3f} s"],
        *([name, "imported" if name in heavy else "not imported"] for name in HEAVY),
    ]
    return text_table(["of the whole process", f"{len(runs_cpu_s)} runs"], rows)


if __name__ == "__main__":
    run(main)
