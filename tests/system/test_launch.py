"""``autotune launch local`` with real torchrun: the run's own exit code, and signals passed on."""

import json
import signal
import subprocess
import sys

import pytest

from autotune.core.profile import profile_to_toml
from autotune.process import start
from tests.autotune.profiles import example_profile
from tests.system.faults.kills import until
from trainer.config import DataSettings, ModelSettings, TrainConfig
from trainer.dataset import read_manifest

pytestmark = pytest.mark.system

TINY = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def launch(tmp_path, patterned_dataset) -> list[str]:
    dataset = read_manifest(patterned_dataset).dataset_hash
    found = example_profile()
    train = TrainConfig(
        model=ModelSettings(name="tiny", config=TINY), data=DataSettings(dataset_hash=dataset), seq_length_tokens=64,
        layout="packed", micro_batch_rows=2, global_batch_rows=4, warmup_steps=2, max_steps=100_000,
    )  # fmt: skip
    fingerprint = found.fingerprint.model_copy(update={"dataset_hash": dataset})
    profile = found.model_copy(update={"train": train, "fingerprint": fingerprint})
    (tmp_path / "p.toml").write_text(profile_to_toml(profile))
    return [sys.executable, "-m", "autotune", "launch", "local", "--profile", "p.toml", "--data",
            str(patterned_dataset), "--out", "run"]  # fmt: skip


@pytest.mark.slow
def test_a_signal_is_passed_on_the_code_is_the_runs_and_the_same_command_goes_on(launch, tmp_path):
    process = start([*launch, "--ranks", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    record = tmp_path / "run" / "steps.jsonl"
    until(lambda: record.is_file() and record.read_text(), "a step", 90)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "launch: the run ended with code 75" in err
    steps = json.loads((tmp_path / "run" / "exit.json").read_text())["steps"]
    again = [*launch, "--ranks", "2", "--set", f"train.max_steps={steps + 2}"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["steps"] == steps + 2
    assert "run: " in done.stdout


def test_a_start_that_never_began_to_train_is_no_success_and_says_so(launch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")  # of no version that can be gone on with
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "left no word" in done.stderr
