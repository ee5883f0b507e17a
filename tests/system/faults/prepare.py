"""``autotune data prepare``, killed and started again."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.system.faults.corpora import content, write_raw
from tests.system.faults.kills import kill_and_repeat, kill_children_and_repeat


def prepare_command(raw: Path, out: Path, workers: int) -> list[str]:
    sources = [f"text:{raw}/*.txt", f"jsonl:{raw}"]
    return [
        sys.executable, "-m", "autotune", "data", "prepare", *sources, "--out", str(out), "--workers", str(workers),
        "--tokenizer", "wordlevel", "--vocab-size", "2048", "--max-tokens", "40", "--long", "split", "--json",
    ]  # fmt: skip


def kill_prepare(
    place: Path, points: int, seed: int, signals: Sequence[int] = (signal.SIGKILL,), workers: int = 2
) -> dict[str, Any]:
    """Kill it at so many moments, and compare what it comes to with an undisturbed run by another number of workers."""
    raw = write_raw(place / "raw")
    expected, undisturbed_s = _undisturbed(raw, place / "whole")
    kills = during = attempts = 0
    while kills < points:
        out = place / f"data-{attempts}"
        # Starting the workers takes as long again; moments lie in all of it.
        rounds = kill_and_repeat(
            prepare_command(raw, out, workers),
            points=min(4, points - kills),
            seed=seed * 1000 + attempts,
            span_s=undisturbed_s + 4,
            signal_number=signals[attempts % len(signals)],
        )
        kills += sum(rounds)
        during += len(rounds)
        attempts += 1
        _check(out, expected)
        assert attempts < 10 * points, "the moments all lie behind its end"
    return {
        "kills": kills,
        "starts_that_finished_first": during - kills,
        "datasets": attempts,
        "byte_identical": attempts,
        "undisturbed_s": round(undisturbed_s, 2),
        "files": len(expected),
        "samples": json.loads((place / "whole" / "manifest.json").read_text())["train"]["shards"][0]["samples"],
    }


def kill_workers(place: Path, points: int, seed: int, lines: int = 20_000) -> dict[str, Any]:
    """Kill so many of the processes that it starts: workers, readers and what these start."""
    raw = write_raw(place / "raw", lines=lines)
    expected, undisturbed_s = _undisturbed(raw, place / "whole")
    kills = attempts = 0
    while kills < points:
        out = place / f"data-{attempts}"
        command = prepare_command(raw, out, 2)
        kills += kill_children_and_repeat(
            command, points=min(4, points - kills), seed=seed * 1000 + attempts, longest_pause_s=undisturbed_s / 2
        )
        attempts += 1
        _check(out, expected)
        shutil.rmtree(out)
    return {
        "kills": kills,
        "datasets": attempts,
        "byte_identical": attempts,
        "undisturbed_s": round(undisturbed_s, 2),
        "files": len(expected),
    }


def _undisturbed(raw: Path, out: Path) -> tuple[dict[str, bytes], float]:
    """What is to come out, and how long it takes."""
    started_s = time.monotonic()
    done = subprocess.run(prepare_command(raw, out, 1), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return content(out), time.monotonic() - started_s


def _check(out: Path, expected: dict[str, bytes]) -> None:
    found = content(out)
    assert found == expected, sorted(name for name in expected if found.get(name) != expected[name])
    left = [path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.")]
    assert not left, left
