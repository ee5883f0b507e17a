"""A kind of subject from another package, installed from ``examples/minitrainer``."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import torch
from minitrainer import MiniTrainer


def make_trainer(batch_size=8, bf16=False):
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
    )
    values = torch.randn(4096, 256)
    dataset = torch.utils.data.TensorDataset(values, values)
    return MiniTrainer(model, dataset, batch_size=batch_size, bf16=bf16)
"""

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs autotune where the package is installed."""
    folder = tmp_path_factory.mktemp("minitrainer")
    site = folder / "site"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--target", str(site)),
            str(ROOT / "examples" / "minitrainer"),
        ],
        check=True,
    )
    (folder / "my_program.py").write_text(PROGRAM)
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def autotune(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autotune", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    autotune.folder = folder
    return autotune


def test_probes_an_outside_kind(run):
    process = run(
        *("probe", "--subject", "minitrainer", "--step", "my_program:make_trainer"),
        *("--memory", "200MB", "--max-micro-batch-size", "64", "--device", "cpu"),
        *("--here", "--out", "mini.toml"),
    )
    assert process.returncode == 0, process.stderr
    profile = tomllib.loads((run.folder / "mini.toml").read_text())
    assert profile["subject"]["kind"] == "minitrainer"
    assert profile["settings"]["batch_size"] <= 64
    shown = run("profile", "show", "mini.toml")
    assert shown.returncode == 0, shown.stderr


def test_names_the_known_kinds(run):
    process = run("probe", "--subject", "unknown", "--step", "my_program:make_trainer")
    assert process.returncode == 3
    assert "minitrainer" in process.stderr
