"""``autotune data stage``, killed and started again."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import write_dataset
from tests.system.faults.corpora import content
from tests.system.faults.kills import kill_and_repeat


def make_dataset(place: Path, mib: int) -> Path:
    """A dataset of about so many MiB, in several shards."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(5, 500, 4096).tolist() for _ in range(mib * 128)]
    return write_dataset(place, samples, shards=8)


def stage_command(source: Path, local: Path) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "autotune", "data", "stage", str(source), "--to", str(local), "--json"]


def kill_stage(place: Path, points: int, seed: int, mib: int = 48) -> dict[str, Any]:
    """Kill it at so many moments; the copy must be whole after each next run, and never half there in between."""
    source = make_dataset(place / "source", mib)
    expected = content(source)
    kills = attempts = 0
    while kills < points:
        local = place / f"local-{attempts}"
        local.mkdir()

        def published_is_whole(local: Path = local) -> None:
            for published in local.glob("autotune-*/*"):
                if published.is_dir() and not published.name.startswith("."):
                    assert content(published) == expected

        rounds = kill_and_repeat(
            stage_command(source, local),
            points=min(4, points - kills),
            seed=seed * 1000 + attempts,
            span_s=1.6,
            check=published_is_whole,
        )
        kills += sum(not one.finished for one in rounds)
        attempts += 1
        (root,) = local.glob("autotune-*")
        (published,) = [path for path in root.iterdir() if path.is_dir()]
        assert content(published) == expected
        assert attempts < 20 * points, "the moments all lie behind its end"
    return {"kills": kills, "copies": attempts, "byte_identical": attempts, "mib": mib, "files": len(expected)}
