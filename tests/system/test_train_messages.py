"""A training that fails or is interrupted ends with its own message and exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testbed.datasets import write_dataset, write_profile_for

AUTOTUNE = Path(sys.executable).with_name("autotune")
SETTINGS = {
    "max_steps": 400,
    "warmup_steps": 1,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "compile": "false",
    "data.num_workers": 0,
}

pytestmark = [pytest.mark.system, pytest.mark.slow]


def train_command(data: Path, run: Path, *more: str) -> list[str]:
    profile = write_profile_for(data, run.parent / "profile.toml")
    words = [str(AUTOTUNE), "train", str(profile), "--data", str(data)]
    words += ["--out", str(run)]
    for name, value in SETTINGS.items():
        words += ["--set", f"train.{name}={value}"]
    return [*words, *more]


@pytest.fixture
def data(tmp_path) -> Path:
    random = np.random.default_rng(0)
    lengths = random.integers(20, 120, size=300)
    samples = [random.integers(5, 400, size=length).tolist() for length in lengths]
    return write_dataset(tmp_path / "data", samples)


@pytest.mark.parametrize("ranks", [1, 2])
def test_corrupt_dataset_ends_with_its_message_only(data, tmp_path, ranks):
    next(data.glob("train-tokens-*.npy")).unlink()
    command = train_command(data, tmp_path / "run", "--ranks", str(ranks))
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr
    # Each rank says which one it is.
    assert ended.stderr.count("error: ") == ranks, ended.stderr
    assert "exit.json" not in ended.stderr
    assert "train-tokens-" in ended.stderr


def heed_ctrl_c() -> None:
    """Undo that tests in the background are started with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_prints_no_traceback(data, tmp_path):
    run = tmp_path / "run"
    training = subprocess.Popen(
        train_command(data, run),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - one system call, no locks
    )
    assert training.stdout is not None
    for line in training.stdout:
        if re.search(r"step +\d+", line):
            break
    os.kill(training.pid, signal.SIGINT)
    printed, _ = training.communicate(timeout=300)
    assert "Traceback" not in printed
    assert training.returncode in (75, 130), printed
