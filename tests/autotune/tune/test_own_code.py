"""``autotune tune`` and ``confirm`` of your own code, with real trials on the CPU."""

import json
import shutil
from pathlib import Path

import pytest

from autotune.profiles.store import read_profile

pytestmark = pytest.mark.system
SMALL = (
    "--memory",
    "64MiB",
    "--max-micro-batch-size",
    "4",
    "--window",
    "0.2s",
    "--device",
    "cpu",
    "--here",
)


@pytest.fixture
def own_step(workdir) -> Path:
    shutil.copy(Path(__file__).with_name("own_step.py"), workdir)
    return workdir


def stages_of(answer) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in answer["stages"]}


def test_tunes_a_step_with_its_loader(says, own_step):
    words = (
        "tune",
        "--step",
        "own_step:build_step",
        "--loader",
        "own_step:build_loader",
        *SMALL,
        "--time-limit",
        "5min",
        "--skip",
        "workers",
    )
    answer = json.loads(says(*words, "--json"))
    stages = stages_of(answer)
    assert {name for name, status in stages.items() if status == "done"} == {
        "probe",
        "confirm",
        "report",
    }
    assert "failed" not in stages.values()
    (path,) = answer["profiles"]
    stored = read_profile(Path(path))
    assert stored.intact
    confirm = stored.profile.evidence.confirm
    assert confirm.unit == "batches"
    assert confirm.delivered.steps >= 3
    assert confirm.promised_tokens_per_s > 0
    page = Path(answer["report"]).read_text()
    assert "Promised and delivered" in page
    assert answer["next_steps"][0].startswith(f"autotune profile show {path}")

    # The same command resumes: no trial runs again.
    again = json.loads(says(*words, "--json"))
    assert read_profile(Path(path)).profile.evidence.confirm == confirm
    assert again["seconds_in_children"] < answer["seconds_in_children"]


def test_confirms_a_training_function(says, own_step):
    along = ("--along", "batch_size")
    probe = ("probe", "--step", "own_step:train", *along, *SMALL)
    probe = [word for word in probe if word not in ("--window", "0.2s")]
    says(*probe)
    (path,) = Path("profiles").glob("*.toml")
    brief = ("--window", "0.2s", "--time-limit", "60s", "--here", "--json")
    confirm = json.loads(says("confirm", path, *brief))
    assert confirm["unit"] == "samples"
    assert confirm["delivered"]["steps"] >= 3
