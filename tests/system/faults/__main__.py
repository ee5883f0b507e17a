"""``python -m tests.system.faults --out FILE`` runs every fault loop in full.

It writes their figures as JSON. ``--only training`` runs the loops of training alone,
and keeps the figures of the others in FILE; so do ``data``, ``files``, ``tuning``, and
the name of a loop.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from autotune.base.readable_json import readable_json
from tests.system.faults import train
from tests.system.faults.corpora import (
    kill_command,
    kill_prepare,
    kill_processes,
    kill_stage,
)
from tests.system.faults.jobs import Workplace
from tests.system.faults.kills import may_mount
from tests.system.faults.mutations import mutate_files
from tests.system.faults.train import Loop
from tests.system.faults.tune import kill_tune

POINTS = 20
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
LOOPS = (
    Loop("prepare SIGKILL, 2 workers", kill_prepare, POINTS),
    Loop("prepare SIGKILL, 1 worker", partial(kill_prepare, workers=1), POINTS),
    Loop(
        "prepare SIGINT and SIGTERM, 2 workers",
        partial(kill_prepare, kill=partial(kill_command, signals=INTERRUPTS)),
        POINTS,
    ),
    Loop(
        "prepare, its workers and readers SIGKILLed",
        partial(kill_prepare, kill=kill_processes, lines=20_000),
        POINTS,
    ),
    Loop("stage SIGKILL", kill_stage, POINTS),
    Loop("mutated files", mutate_files, 5000, kind="files"),
    Loop(
        "tune SIGKILL",
        kill_tune,
        10,
        "SIGKILL of its process group, or of the process alone, in each stage from the "
        "probe to the report",
        "goes on to its end, no finished probe trial runs twice, profile and report"
        " always whole, nothing left behind; on its trial log alone the same is decided"
        " without a trial",
        kind="tuning",
    ),
    *train.LOOPS,
)


def main() -> int:
    """Run the loops; an assertion fails if a fault was not survived."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.system.faults", description="Run the fault loops in full."
    )
    parser.add_argument("--out", type=Path, required=True, help="where the figures go")
    parser.add_argument(
        "--points",
        type=int,
        default=POINTS,
        help="kills of each loop; others are scaled alike",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--only",
        action="append",
        help="loops of this kind or name; what FILE has of others stays",
    )
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if options.only and options.out.is_file():
        figures = json.loads(options.out.read_text())
    figures |= {
        "python": platform.python_version(),
        "points": options.points,
        "seed": options.seed,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    selected = [
        loop
        for loop in LOOPS
        if not options.only or {loop.kind, loop.name} & set(options.only)
    ]
    with tempfile.TemporaryDirectory(prefix="faults-") as trainings:
        # Loops of training share a workplace, and so its undisturbed runs.
        workplace = Workplace(Path(trainings))
        for number, loop in enumerate(selected):
            if loop.needs_mount and not may_mount():
                sys.stderr.write(f"{loop.name}: left out, as it needs root to mount\n")
                continue
            started_s = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="faults-") as directory:
                place = workplace if loop.kind == "training" else Path(directory)
                points = max(1, round(loop.in_full * options.points / POINTS))
                loop_figures = loop.description | loop.run(
                    place, points=points, seed=options.seed + number
                )
            loop_figures["seconds"] = round(time.monotonic() - started_s, 1)
            sys.stderr.write(f"{loop.name}: {json.dumps(loop_figures)}\n")
            table = figures
            if loop.kind in ("training", "tuning"):
                table = figures.setdefault(loop.kind, {})
            table[loop.name] = loop_figures
            # After every loop: one that fails must not cost the figures of the others.
            options.out.write_text(readable_json(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
