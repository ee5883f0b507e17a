"""``python -m benchmarks.cli``: the time of ``autotune --help``, and its imports.

The median of five whole processes after one that warms the file cache must stay below
half a second, which is about as long as a person waits without noticing. The program
that answers must not import torch: that alone takes seconds.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from autotune.base.tables import text_table
from benchmarks.bars import Bar, finish, measuring, parser, run
from testbed.programs import CannotMeasure, run_program

RUNS = 5
HELP_BAR_S = 0.5
TIMEOUT_S = 60.0
HEAVY = ("torch", "transformers", "optuna")
"""Each takes longer to import than the whole answer may."""

COMMAND = (sys.executable, "-m", "autotune", "--help")


@measuring
def main(arguments: Sequence[str] | None) -> int:
    """Measure, print and return the exit code."""
    options_of = parser("cli", "Time `autotune --help`.")
    options = options_of.parse_args(arguments)
    heavy = heavy_imports(COMMAND)
    runs_s = [_seconds(COMMAND) for _ in range(1 + RUNS)][1:]
    bars = make_bars(runs_s, heavy)
    return finish(
        options.json,
        bars,
        {"runs_s": runs_s, "heavy_imports": heavy},
        _table(runs_s, heavy),
    )


def make_bars(runs_s: Sequence[float], heavy: Sequence[str]) -> list[Bar]:
    """Return the two bars of the command line."""
    return [
        Bar(
            name="cli_help_s",
            figure=statistics.median(runs_s),
            unit="s",
            bar=HELP_BAR_S,
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


def _seconds(command: Sequence[str]) -> float:
    started_s = time.perf_counter()
    _run(command)
    return time.perf_counter() - started_s


def _run(command: Sequence[str]) -> str:
    """Run it; what it says on standard error is among what it prints."""
    environment = os.environ | {"NO_COLOR": "1"}
    return run_program(
        command, timeout_s=TIMEOUT_S, env=environment, stderr=subprocess.STDOUT
    )


def _table(runs_s: Sequence[float], heavy: Sequence[str]) -> str:
    rows = [
        ["autotune --help, median", f"{statistics.median(runs_s):.3f} s"],
        ["fastest and slowest", f"{min(runs_s):.3f} s, {max(runs_s):.3f} s"],
        *([name, "imported" if name in heavy else "not imported"] for name in HEAVY),
    ]
    return text_table(["of the whole process", f"{len(runs_s)} runs"], rows)


if __name__ == "__main__":
    run(main)
