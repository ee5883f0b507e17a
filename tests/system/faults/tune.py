"""``autotune tune``, killed in each of its stages and started again.

Each stage gets the least of the time, whatever the moment of a kill, so that what is
decided follows from the trial log alone: in the end the same command on a copy of that
trial log has to come to the same without one trial.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from autotune.base.process import start_child
from autotune.profiles.store import read_profile
from autotune.profiles.values import profile_from_tables
from autotune.trials.trial_log import read_trial_log
from testbed.datasets import write_dataset
from tests.system.faults.kills import children_of

TINY = {
    "model_type": "bert",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
STAGES = ("probe", "explore", "workers", "baseline", "report")
LONGEST_PAUSE_S = 3.0
"""After a stage began, until the kill."""
ROOT = Path(__file__).parents[3]
GONE_WITHIN_S = 30.0
REPEATED = ("measured", "out_of_memory")
"""Outcomes that need no second trial."""
COMMAND_LINE = """
import sys
from autotune import cli
from autotune.tune.values import BUDGET_WEIGHTS
from autotune.tune import pipeline as tune
tune.least_s = lambda *_: 0.0
tune.share_s = lambda stages, stage, left_s: 6.0 if stage.name in BUDGET_WEIGHTS else None
sys.exit(cli.run(sys.argv[1:]))
"""
"""Each stage has six seconds, however long others took, so that replays decide
alike."""
_BEFORE = dict(zip(STAGES, ("estimate", *STAGES), strict=False))


class TunePlace:
    """Where a tuning runs, and what was seen of it."""

    def __init__(self, directory: Path, temporary: Path) -> None:
        """Make a directory of what it tunes; ``temporary`` has few letters, as sockets
        of loader workers lie there."""
        self.directory = directory
        self.profile = directory / "profiles" / "tiny-cpu.toml"
        self.report = directory / "reports" / "tiny-cpu"
        self.told = directory / "stderr"
        self.files_read = 0
        self._read: dict[Path, int] = {}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "AUTOTUNE"))
        }
        # Few threads, as others compute on the same cores.
        self._environment = inherited | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
        }
        directory.mkdir()
        (directory / "tiny.json").write_text(json.dumps(TINY))
        rng = np.random.default_rng(0)
        starts, lengths = (
            rng.integers(5, 400, 400).tolist(),
            rng.integers(8, 60, 400).tolist(),
        )
        samples = [
            list(range(start, start + length))
            for start, length in zip(starts, lengths, strict=True)
        ]
        write_dataset(directory / "data", samples)

    def start(self, stdout: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-c",
            COMMAND_LINE,
            "tune",
            "--model",
            "tiny.json",
            "--data",
            "data",
            "--device",
            "cpu",
            "--memory",
            "64MiB",
            "--seq-length",
            "64",
            "--global-batch-tokens",
            "512",
            "--max-micro-batch-size",
            "32",
            "--window",
            "0.3s",
            "--time-limit",
            "30min",
            "--explore",
            "--here",
            "--json",
        ]
        with self.told.open("wb") as told:
            return start_child(
                command,
                cwd=self.directory,
                env=self._environment,
                stdout=stdout,
                stderr=told,
                start_new_session=True,
            )

    def finish(self) -> dict[str, Any]:
        process = self.start(subprocess.PIPE)
        out, _ = process.communicate(timeout=900)
        assert process.returncode == 0, self.told.read_text()
        answer: dict[str, Any] = json.loads(out)
        return answer

    def check_files(self) -> None:
        """That profile and report are whole, or absent; each is read once after it was
        written."""
        report = self.report / "report.html"
        for path in (
            self.profile,
            report,
            report.with_suffix(".md"),
            report.with_suffix(".json"),
        ):
            with contextlib.suppress(FileNotFoundError):
                written_ns = path.stat().st_mtime_ns
                if self._read.get(path) != written_ns:
                    _check_whole(path)
                    self._read[path] = written_ns
                    self.files_read += 1

    def has_ended(self, stage: str) -> bool:
        """Whether a stage of the last start is over, by what it told."""
        told = self.told.read_text(errors="replace")
        return re.search(f"^tune .*: {stage} ", told, re.MULTILINE) is not None

    def trials(self) -> list[dict[str, Any]]:
        return read_trial_log(self.report / "trials")[0]


def _check_whole(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".toml":
        assert profile_from_tables(tomllib.loads(text), where=str(path))[1], (
            f"{path} has not the hash it says"
        )
    elif path.suffix == ".json":
        json.loads(text)
    else:
        assert text.endswith("\n" if path.suffix == ".md" else "</html>\n"), (
            f"{path} is cut"
        )


def kill_tune(directory: Path, points: int, seed: int) -> dict[str, Any]:
    """Kill tunings at so many moments, each in several of its stages; then finish and
    replay them."""
    rng = random.Random(seed)
    figures, runs = Counter[str](), 0
    while figures["faults"] < points:
        chosen = rng.sample(STAGES, min(len(STAGES), points - figures["faults"]))
        in_order = [stage for stage in STAGES if stage in chosen]
        with tempfile.TemporaryDirectory(prefix="tune-") as temporary:
            figures += _kill_one(
                directory / f"run-{runs}", Path(temporary), in_order, rng
            )
        runs += 1
    return {"runs": runs, **figures}


def _kill_one(
    directory: Path, temporary: Path, stages: Sequence[str], rng: random.Random
) -> Counter[str]:
    """Kill one tuning in each of these stages, in turn its whole process group and the
    process alone."""
    directory.mkdir()
    place = TunePlace(directory / "killed", temporary)
    kills = starts = 0
    while kills < len(stages):
        starts += 1
        kills += _kill(
            place, stages[kills], rng.uniform(0, LONGEST_PAUSE_S), group=kills % 2 == 0
        )
        assert starts < 4 * len(stages) + 4, "the moments all lie behind its end"
    answer = place.finish()
    place.check_files()
    assert [one["status"] for one in answer["stages"] if one["name"] in STAGES] == [
        "done"
    ] * len(STAGES), answer
    steps = [
        one
        for one in place.trials()
        if one["job"] == "step" and one["outcome"]["kind"] in REPEATED
    ]
    repeated = [
        key for key, count in Counter(one["key"] for one in steps).items() if count > 1
    ]
    assert not repeated, f"ran twice: {repeated}"
    replayed = _replay(place, TunePlace(directory / "replayed", temporary))
    trials = {"trials": len(place.trials()), "trials_replayed": replayed}
    return Counter(
        {"faults": kills, "files_read_while_it_ran": place.files_read} | trials
    )


def _kill(place: TunePlace, stage: str, pause_s: float, *, group: bool) -> bool:
    """Start it, and kill it so long after a stage began; False if it was over
    before."""
    process = place.start()
    while process.poll() is None and not place.has_ended(_BEFORE[stage]):
        place.check_files()
        time.sleep(0.02)
    children: set[psutil.Process] = set()
    deadline_s = time.monotonic() + pause_s
    while (
        process.poll() is None
        and time.monotonic() < deadline_s
        and not place.has_ended(stage)
    ):
        place.check_files()
        children.update(children_of(process.pid))
        time.sleep(0.02)
    children.update(children_of(process.pid))
    struck = process.poll() is None
    if struck and group:
        os.killpg(process.pid, signal.SIGKILL)
    elif struck:
        process.kill()
    process.wait(60)
    assert struck or process.returncode == 0, place.told.read_text()
    _, alive = psutil.wait_procs(children, timeout=GONE_WITHIN_S)
    assert not alive, f"left behind: {alive}"
    place.check_files()
    return struck


def _replay(place: TunePlace, again: TunePlace) -> int:
    """The same command where there is nothing but the trial log: it decides the same,
    and runs no trial."""
    shutil.copytree(place.report / "trials", again.report / "trials")
    again.finish()
    before, after = place.trials(), again.trials()
    new = [one["label"] for one in after[len(before) :]]
    assert not new, f"measured again: {new}"
    decided = attrgetter("train", "constraints", "evidence")
    assert decided(read_profile(place.profile).profile) == decided(
        read_profile(again.profile).profile
    )
    return len(after)
