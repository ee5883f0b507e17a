"""``python -m tests.system.faults --out FILE``: every fault loop in full, its figures as JSON.

``--only train`` runs the loops of training alone, and leaves the figures of the others as they are in FILE; ``data``,
``files`` and ``tune`` are the others.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune.store import json_rows
from tests.system.faults.jobs import Workplace
from tests.system.faults.kills import may_mount
from tests.system.faults.mutations import mutate_files
from tests.system.faults.prepare import kill_prepare, kill_workers
from tests.system.faults.stage import kill_stage
from tests.system.faults.training_loops import LOOPS, TRAINING
from tests.system.faults.tune import kill_tune

POINTS = 20
CASES = 5000
TUNING, TUNING_IN_FULL = "tuning", 10
"""Where the figures of tunings are, and how many kills they have where the others have ``POINTS``."""


def main() -> int:
    """Run the loops; an assertion fails where a fault was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.faults", description="Run the fault loops in full.")
    parser.add_argument("--out", type=Path, required=True, help="where the figures go")
    parser.add_argument("--points", type=int, default=POINTS, help="kills of each loop; those of training are scaled")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--loop", action="append", help="only this one of training; what FILE has of others stays")
    parser.add_argument("--only", choices=("data", "files", "tune", "train"), help="loops of these alone")
    options = parser.parse_args()
    some = options.only or options.loop
    figures: dict[str, Any] = json.loads(options.out.read_text()) if some and options.out.is_file() else {}
    figures |= {"python": platform.python_version(), "points": options.points, "seed": options.seed}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for (kind, name), loop in _loops_but_training(options.points, options.seed).items():
        if options.only in (None, kind) and not options.loop:
            with tempfile.TemporaryDirectory(prefix="faults-") as place:
                found = _timed(name, loop, Path(place))
            figures |= {TUNING: {name: found}} if kind == "tune" else {name: found}
            _keep(options.out, figures)
    if options.only in (None, "train"):
        known = figures.get(TRAINING, {}) if options.loop else {}
        for name, found in _train(options.points, options.seed, options.loop):
            known[name] = found
            figures[TRAINING] = {loop.name: known[loop.name] for loop in LOOPS if loop.name in known}
            _keep(options.out, figures)
    return 0


def _keep(out: Path, figures: dict[str, Any]) -> None:
    """After every loop: one that fails must not cost what the others found."""
    out.write_text(json_rows(figures))


def _loops_but_training(points: int, seed: int) -> dict[tuple[str, str], Callable[[Path], dict[str, Any]]]:
    tunings = max(1, round(TUNING_IN_FULL * points / POINTS))
    asked = (signal.SIGINT, signal.SIGTERM)
    return {
        ("data", "prepare SIGKILL, 2 workers"): partial(kill_prepare, points=points, seed=seed),
        ("data", "prepare SIGKILL, 1 worker"): partial(kill_prepare, points=points, seed=seed + 1, workers=1),
        ("data", "prepare SIGINT and SIGTERM, 2 workers"): partial(
            kill_prepare, points=points, seed=seed + 2, signals=asked
        ),
        ("data", "prepare, its workers and readers SIGKILLed"): partial(kill_workers, points=points, seed=seed + 4),
        ("data", "stage SIGKILL"): partial(kill_stage, points=points, seed=seed + 3),
        ("files", "mutated files"): partial(mutate_files, cases=CASES, seed=seed),
        ("tune", "tune SIGKILL"): partial(kill_tune, points=tunings, seed=seed),
    }


def _train(points: int, seed: int, names: Sequence[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """All loops of training in one place, as they share the undisturbed runs."""
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        place = Workplace(Path(directory))
        for number, loop in enumerate(LOOPS):
            if names and loop.name not in names:
                continue
            if loop.needs_mount and not may_mount():
                sys.stderr.write(f"{loop.name}: left out, as it needs root to mount\n")
                continue
            scaled = max(1, round(loop.in_full * points / POINTS))
            told = {"injected": loop.injected, "held": loop.held}
            found = _timed(loop.name, partial(loop.run, points=scaled, seed=seed + number), place)
            yield loop.name, told | found


def _timed(name: str, loop: Callable[[Any], dict[str, Any]], place: object) -> dict[str, Any]:
    started_s = time.monotonic()
    found = loop(place) | {"seconds": round(time.monotonic() - started_s, 1)}
    sys.stderr.write(f"{name}: {json.dumps(found)}\n")
    return found


if __name__ == "__main__":
    sys.exit(main())
