"""``python -m tests.system.faults --out FILE``: every fault loop in full, its figures as JSON."""

import argparse
import json
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.system.faults.prepare import kill_prepare, kill_workers
from tests.system.faults.stage import kill_stage

POINTS = 20


def main() -> int:
    """Run the loops; an assertion fails where a fault was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.faults", description="Run the fault loops in full.")
    parser.add_argument("--out", type=Path, required=True, help="where the figures go")
    parser.add_argument("--points", type=int, default=POINTS, help="kills of each loop")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    loops = {
        "prepare SIGKILL, 2 workers": lambda place: kill_prepare(place, options.points, options.seed),
        "prepare SIGKILL, 1 worker": lambda place: kill_prepare(place, options.points, options.seed + 1, workers=1),
        "prepare SIGINT and SIGTERM, 2 workers": lambda place: kill_prepare(
            place, options.points, options.seed + 2, signals=(signal.SIGINT, signal.SIGTERM)
        ),
        "prepare, its workers and readers SIGKILLed": lambda place: kill_workers(
            place, options.points, options.seed + 4
        ),
        "stage SIGKILL": lambda place: kill_stage(place, options.points, options.seed + 3),
    }
    figures: dict[str, object] = {"python": platform.python_version(), "points": options.points, "seed": options.seed}
    for name, loop in loops.items():
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faults-") as place:
            found = loop(Path(place))
        figures[name] = found | {"seconds": round(time.monotonic() - started_s, 1)}
        sys.stderr.write(f"{name}: {json.dumps(figures[name])}\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
