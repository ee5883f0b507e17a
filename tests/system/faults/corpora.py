"""Commands that make and copy datasets, killed and started again; and their raw data.

The raw data are the same every time.
"""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from autotune.base.process import start_child
from testbed.datasets import write_dataset
from testbed.programs import run_program
from tests.system.faults.kills import children_of, start

Kill = Callable[[list[str], int, random.Random, float], int]
"""Function that starts a command repeatedly and kills it, until a start succeeds.

Its arguments are the command, the most kills, a random generator and the time of an
undisturbed run; it returns the number of kills.
"""


def write_raw(directory: Path, *, files: int = 6, lines: int = 4000) -> Path:
    """Text and JSON lines with repetitions, and some that cannot be used."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    words = [f"word{number}" for number in range(3000)]
    for number in range(files):
        texts = [
            " ".join(rng.choices(words, k=rng.randint(1, 60))) for _ in range(lines)
        ]
        texts += rng.choices(texts, k=lines // 4)
        if number % 2:
            content = (
                "".join(json.dumps({"text": text}) + "\n" for text in texts)
                + "no json\n"
            )
            (directory / f"{number}.jsonl").write_text(content)
        else:
            (directory / f"{number}.txt").write_bytes(
                "\n".join(texts).encode() + b"\nbad \xff utf-8\n"
            )
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def prepare_command(raw: Path, out: Path, workers: int) -> list[str]:
    sources = [f"text:{raw}/*.txt", f"jsonl:{raw}"]
    return [
        sys.executable,
        "-m",
        "autotune",
        "data",
        "prepare",
        *sources,
        "--out",
        str(out),
        "--workers",
        str(workers),
        "--tokenizer",
        "wordlevel",
        "--vocab-size",
        "2048",
        "--max-tokens",
        "40",
        "--long",
        "split",
        "--json",
    ]


def kill_command(
    command: list[str],
    points: int,
    rng: random.Random,
    usual_s: float,
    *,
    signals: Sequence[int] = (signal.SIGKILL,),
) -> int:
    """Kill a command at random moments; nothing that it started may outlive it."""
    for kills in range(points):
        # Starting the workers takes as long again; moments lie in all of it.
        deadline_s = time.monotonic() + rng.uniform(0, usual_s + 4)
        process = start(command)
        children: list[psutil.Process] = []
        while time.monotonic() < deadline_s and process.poll() is None:
            children = children_of(process.pid) or children
            time.sleep(0.01)
        finished = process.poll() is not None
        if not finished:
            process.send_signal(rng.choice(signals))
        process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, f"left behind: {alive}"
        if finished:
            return kills
    _finish(command)
    return points


def kill_processes(
    command: list[str], points: int, rng: random.Random, usual_s: float
) -> int:
    """Kill random processes that a command has started, but not the command.

    It may end with an error that gives the reason.
    """
    kills = 0
    while True:
        process = start_child(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None:
            time.sleep(rng.uniform(0, usual_s / 2))
            with contextlib.suppress(psutil.NoSuchProcess):
                # Python's own resource tracker does no work, and prints an error when
                # it is killed.
                victims = [
                    child
                    for child in children_of(process.pid)
                    if "resource_tracker" not in " ".join(child.cmdline())
                ]
                if kills < points and victims:
                    rng.choice(victims).kill()
                    kills += 1
        _, stderr = process.communicate()
        assert "Traceback" not in stderr, stderr
        if process.returncode == 0:
            return kills
        assert "next: " in stderr, stderr


def kill_prepare(
    place: Path,
    points: int,
    seed: int,
    *,
    kill: Kill = kill_command,
    workers: int = 2,
    lines: int = 4000,
) -> dict[str, Any]:
    """Kill preparations; compare their datasets with that of an undisturbed one.

    The undisturbed one has one worker.
    """
    raw = write_raw(place / "raw", lines=lines)
    _, undisturbed_s = _finish(prepare_command(raw, place / "whole", 1))
    expected = content(place / "whole")
    rng = random.Random(seed)
    kills = 0
    attempts = 0
    while kills < points:
        out = place / f"data-{attempts}"
        kills += kill(
            prepare_command(raw, out, workers),
            min(4, points - kills),
            rng,
            undisturbed_s,
        )
        attempts += 1
        files = content(out)
        assert files == expected, sorted(
            name for name in expected if files.get(name) != expected[name]
        )
        assert list(place.glob(f".{out.name}.*")) == []
        assert attempts < 10 * points, "the moments all lie behind its end"
    return {"kills": kills, "datasets": attempts, "byte_identical": attempts}


def make_dataset(directory: Path, mib: int) -> Path:
    """Write a dataset of about this size, in several shards."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(5, 500, 4096).tolist() for _ in range(mib * 128)]
    return write_dataset(directory, samples, shards=8)


def stage_command(source: Path, local: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "autotune",
        "data",
        "stage",
        str(source),
        "--to",
        str(local),
        "--json",
    ]


def partials(local: Path) -> list[Path]:
    return list(local.glob("autotune-*/.partial-*"))


def wait_for_copy(
    local: Path, process: "subprocess.Popen[bytes]", earlier: Collection[Path] = ()
) -> None:
    """Wait until a process copies, or has ended.

    ``earlier`` are partial copies of earlier processes.
    """
    while process.poll() is None and set(partials(local)) <= set(earlier):
        time.sleep(0.001)


def kill_stage(place: Path, points: int, seed: int, mib: int = 48) -> dict[str, Any]:
    """Kill staging; each next run must complete the copy, and no partial one is used.

    Every other kill, on average, is at a moment of the copy itself; the rest are
    anywhere from start to end.
    """
    source = make_dataset(place / "source", mib)
    expected = content(source)
    (place / "undisturbed").mkdir()
    answer, undisturbed_s = _finish(stage_command(source, place / "undisturbed"))
    copying_s = answer["copied"]["seconds"]
    rng = random.Random(seed)
    kills = 0
    attempts = 0
    partial_copies: set[Path] = set()
    while kills < points:
        local = place / f"local-{attempts}"
        local.mkdir()
        for _ in range(min(4, points - kills)):
            earlier = partials(local)
            process = start(stage_command(source, local))
            if rng.random() < 0.5 and not _published(local):
                wait_for_copy(local, process, earlier)
                time.sleep(rng.uniform(0, copying_s))
            else:
                time.sleep(rng.uniform(0, undisturbed_s))
            was_running = process.poll() is None
            process.kill()
            process.wait(60)
            kills += was_running
            partial_copies.update(partials(local))
            for published in _published(local):
                assert content(published) == expected
            if not was_running:
                break
        attempts += 1
        answer, _ = _finish(stage_command(source, local))
        copied = Path(answer["directory"])
        assert _published(local) == [copied]
        assert content(copied) == expected
        assert partials(local) == []
        assert attempts < 20 * points, "the moments all lie behind its end"
    return {
        "kills": kills,
        "copies": attempts,
        "byte_identical": attempts,
        "kills_that_left_half_a_copy": len(partial_copies),
    }


def _finish(command: list[str]) -> tuple[dict[str, Any], float]:
    """Run a command to its end; return its answer and its time in seconds."""
    started_s = time.monotonic()
    answer = json.loads(run_program(command))
    return answer, time.monotonic() - started_s


def _published(local: Path) -> list[Path]:
    return [
        path
        for path in local.glob("autotune-*/*")
        if path.is_dir() and not path.name.startswith(".")
    ]
