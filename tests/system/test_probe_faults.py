"""A probe that is killed with SIGKILL goes on where it was: no finished trial runs a second time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import write_dataset
from tests.system.faults.tune import TINY

pytestmark = pytest.mark.system


def command(data: Path) -> list[str]:
    return [
        sys.executable, "-m", "autotune", "probe", "--model", "tiny.json", "--data", str(data), "--device", "cpu",
        "--memory", "64MiB", "--seq-length", "64", "--max-rows", "64", "--here", "--json",
    ]  # fmt: skip


def records(place: Path) -> list[dict]:
    lines = [line for file in sorted(place.rglob("*.jsonl")) for line in file.read_text().splitlines()]
    found = []
    for line in lines:
        try:
            found.append(json.loads(line)["record"])
        except json.JSONDecodeError:  # a torn last line is what a kill may leave
            continue
    return found


def test_a_killed_probe_repeats_no_finished_trial_and_comes_to_an_answer(tmp_path):
    data = write_dataset(tmp_path / "data", [[5 + n % 400 for n in range(40)] for _ in range(600)])
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    kills = 0
    for finished in (2,):
        process = subprocess.Popen(
            command(data), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        end_s = time.monotonic() + 120
        while len(records(tmp_path)) < finished and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    done = subprocess.run(command(data), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    one = json.loads(done.stdout)["models"][0]
    assert one["infeasible_min"] in (one["feasible_max"] + 1, None)
    ended = [
        record["key"] for record in records(tmp_path) if record["outcome"]["kind"] in ("measured", "out_of_memory")
    ]
    assert len(ended) == len(set(ended))
    assert kills >= 1
    assert any(trial["from_ledger"] for trial in one["trials"])
