"""``autotune data stage``, killed and started again."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import write_dataset
from tests.system.faults.corpora import content
from tests.system.faults.kills import start


def make_dataset(place: Path, mib: int) -> Path:
    """A dataset of about so many MiB, in several shards."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(5, 500, 4096).tolist() for _ in range(mib * 128)]
    return write_dataset(place, samples, shards=8)


def stage_command(source: Path, local: Path) -> list[str]:
    return [sys.executable, "-m", "autotune", "data", "stage", str(source), "--to", str(local), "--json"]


def partials(local: Path) -> list[Path]:
    return list(local.glob("autotune-*/.partial-*"))


def wait_for_copy(local: Path, process: "subprocess.Popen[bytes]", left: Collection[Path] = ()) -> None:
    """Wait until a process has a copy at work, besides what others left, or has ended."""
    while process.poll() is None and set(partials(local)) <= set(left):
        time.sleep(0.001)


def kill_stage(place: Path, points: int, seed: int, mib: int = 48) -> dict[str, Any]:
    """Kill it at so many moments; the copy must be whole after each next run, and never half there in between.

    Every other kill, on average, is at a moment of the copy itself; the rest are anywhere from start to end.
    """
    source = make_dataset(place / "source", mib)
    expected = content(source)
    (place / "undisturbed").mkdir()
    undisturbed = _finish(source, place / "undisturbed")
    rng = random.Random(seed)
    kills = attempts = 0
    halves: set[Path] = set()
    while kills < points:
        local = place / f"local-{attempts}"
        local.mkdir()
        for _ in range(min(4, points - kills)):
            killed = _kill(source, local, rng, undisturbed)
            kills += killed
            halves.update(partials(local))
            assert all(content(published) == expected for published in _published(local))
            if not killed:
                break
        attempts += 1
        told = _finish(source, local)
        assert [Path(told["directory"])] == _published(local)
        assert content(Path(told["directory"])) == expected
        assert partials(local) == []
        assert attempts < 20 * points, "the moments all lie behind its end"
    return {
        "kills": kills,
        "kills_that_left_half_a_copy": len(halves),
        "copies": attempts,
        "byte_identical": attempts,
        "undisturbed_s": round(undisturbed["wall_s"], 2),
        "mib": mib,
        "files": len(expected),
    }


def _kill(source: Path, local: Path, rng: random.Random, undisturbed: Mapping[str, Any]) -> bool:
    """Kill one run; False if it was done before."""
    left = partials(local)
    process = start(stage_command(source, local))
    if rng.random() < 0.5 and not _published(local):
        wait_for_copy(local, process, left)
        time.sleep(rng.uniform(0, undisturbed["copied"]["seconds"]))
    else:
        time.sleep(rng.uniform(0, undisturbed["wall_s"]))
    killed = process.poll() is None
    process.kill()
    process.wait(60)
    return killed


def _finish(source: Path, local: Path) -> dict[str, Any]:
    """Let one run come to its end; what it says, and what it took."""
    started_s = time.monotonic()
    done = subprocess.run(stage_command(source, local), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "wall_s": time.monotonic() - started_s}


def _published(local: Path) -> list[Path]:
    return [path for path in local.glob("autotune-*/*") if path.is_dir() and not path.name.startswith(".")]
