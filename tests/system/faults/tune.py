"""``autotune tune``, killed in each of its stages and started again.

Each stage gets the least time, whatever the moment of a kill, so that all decisions
follow from the trial log alone: in the end the same command on a copy of that trial log
must decide the same without a single trial.
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
from autotune.profiles.toml_file import profile_from_tables
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
STAGES = ("probe", "explore", "workers", "confirm", "baseline", "report")
LONGEST_PAUSE_S = 3.0
"""Longest time from the start of a stage to the kill."""
ROOT = Path(__file__).parents[3]
GONE_WITHIN_S = 30.0
FINAL_OUTCOMES = ("measured", "out_of_memory")
"""Outcomes that need no second trial."""
COMMAND_LINE = """
import sys
from autotune import cli
from autotune.tune.values import BUDGET_WEIGHTS
from autotune.tune import pipeline as tune
tune.least_s = lambda *_: 0.0
def share_s(stages, stage, left_s):
    return 6.0 if stage.name in BUDGET_WEIGHTS else None
tune.share_s = share_s
tune.training_s = lambda *_, **__: 15.0
sys.exit(cli.run(sys.argv[1:]))
"""
"""Each stage has six seconds, however long others took, so that replays decide alike.
The training at the end of ``confirm`` has 15 more, enough for its start."""
STAGE_BEFORE = dict(zip(STAGES, ("estimate", *STAGES), strict=False))


class TunePlace:
    """Directory of a tuning, and observations of its files."""

    def __init__(self, directory: Path, temporary: Path) -> None:
        """Write a model and a dataset to tune.

        The path of ``temporary`` must be short, as sockets of DataLoader workers lie
        there.
        """
        self.directory = directory
        self.profile = directory / "profiles" / "tiny-cpu.toml"
        self.report = directory / "reports" / "tiny-cpu"
        self.stderr = directory / "stderr"
        self.files_read = 0
        self._read: dict[Path, int] = {}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "AUTOTUNE"))
        }
        # Few threads, as other programs compute on the same cores.
        self._environment = inherited | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
        }
        directory.mkdir()
        (directory / "tiny.json").write_text(json.dumps(TINY))
        rng = np.random.default_rng(0)
        starts = rng.integers(5, 400, 400).tolist()
        lengths = rng.integers(8, 60, 400).tolist()
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
        with self.stderr.open("wb") as stderr:
            return start_child(
                command,
                cwd=self.directory,
                env=self._environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def finish(self) -> dict[str, Any]:
        process = self.start(subprocess.PIPE)
        output, _ = process.communicate(timeout=900)
        assert process.returncode == 0, self.stderr.read_text()
        answer: dict[str, Any] = json.loads(output)
        return answer

    def check_files(self) -> None:
        """Check that profile and report are intact or absent.

        Each is read once after it was written.
        """
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
                    _check_intact(path)
                    self._read[path] = written_ns
                    self.files_read += 1

    def has_ended(self, stage: str) -> bool:
        """Return whether the last start has reported the end of a stage."""
        stderr = self.stderr.read_text(errors="replace")
        return re.search(f"^tune .*: {stage} ", stderr, re.MULTILINE) is not None

    def trials(self) -> list[dict[str, Any]]:
        records, _ = read_trial_log(self.report / "trials")
        return records


def _check_intact(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".toml":
        _, has_its_hash = profile_from_tables(tomllib.loads(text), where=str(path))
        assert has_its_hash, f"{path} does not match its hash"
    elif path.suffix == ".json":
        json.loads(text)
    elif path.suffix == ".md":
        assert text.endswith("\n"), f"{path} is cut"
    else:
        assert text.endswith("</html>\n"), f"{path} is cut"


def kill_tune(directory: Path, points: int, seed: int) -> dict[str, Any]:
    """Kill tunings, each in several of its stages; then finish and replay them."""
    rng = random.Random(seed)
    figures = Counter[str]()
    runs = 0
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
    """Kill one tuning in each of these stages.

    In turn, its whole process group and the process alone are killed.
    """
    directory.mkdir()
    place = TunePlace(directory / "killed", temporary)
    kills = 0
    starts = 0
    while kills < len(stages):
        starts += 1
        pause_s = rng.uniform(0, LONGEST_PAUSE_S)
        kills += _kill(place, stages[kills], pause_s, group=kills % 2 == 0)
        assert starts < 4 * len(stages) + 4, "the moments all lie behind its end"
    answer = place.finish()
    place.check_files()
    statuses = [
        stage["status"] for stage in answer["stages"] if stage["name"] in STAGES
    ]
    assert statuses == ["done"] * len(STAGES), answer
    finished_steps = Counter(
        trial["key"]
        for trial in place.trials()
        if trial["job"] == "step" and trial["outcome"]["kind"] in FINAL_OUTCOMES
    )
    repeated = [key for key, count in finished_steps.items() if count > 1]
    assert not repeated, f"ran twice: {repeated}"
    replayed = _replay(place, TunePlace(directory / "replayed", temporary))
    return Counter(
        {
            "faults": kills,
            "files_read_while_it_ran": place.files_read,
            "trials": len(place.trials()),
            "trials_replayed": replayed,
        }
    )


def _kill(place: TunePlace, stage: str, pause_s: float, *, group: bool) -> bool:
    """Start a tuning, and kill it a while after a stage began.

    Return False if it ended before.
    """
    process = place.start()
    while process.poll() is None and not place.has_ended(STAGE_BEFORE[stage]):
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
    is_running = process.poll() is None
    if is_running and group:
        os.killpg(process.pid, signal.SIGKILL)
    elif is_running:
        process.kill()
    process.wait(60)
    assert is_running or process.returncode == 0, place.stderr.read_text()
    _, alive = psutil.wait_procs(children, timeout=GONE_WITHIN_S)
    assert not alive, f"left behind: {alive}"
    place.check_files()
    return is_running


def _replay(place: TunePlace, replay: TunePlace) -> int:
    """Run the same command with nothing but the trial log.

    It must decide the same, and run no trial. Return the number of trials in the log.
    """
    shutil.copytree(place.report / "trials", replay.report / "trials")
    replay.finish()
    trials = place.trials()
    replayed_trials = replay.trials()
    new_labels = [trial["label"] for trial in replayed_trials[len(trials) :]]
    assert not new_labels, f"measured again: {new_labels}"
    decisions = attrgetter("train", "constraints", "evidence")
    profile = read_profile(place.profile).profile
    replayed_profile = read_profile(replay.profile).profile
    assert decisions(profile) == decisions(replayed_profile)
    return len(replayed_trials)
