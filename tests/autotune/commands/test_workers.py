import pytest

from autotune.core.profile import profile_to_toml
from tests.autotune.profiles import example_profile

WORKERS = ["workers", "--profile", "p.toml"]


@pytest.fixture
def on_gpu(here):
    """The profile, of a GPU."""
    probed = example_profile()
    train = probed.train.model_copy(update={"device": "cuda"})
    (here / "p.toml").write_text(profile_to_toml(probed.model_copy(update={"train": train})))


@pytest.mark.parametrize("command", ["workers", "baseline"])
def test_a_profile_without_a_probe_is_refused_before_anything_is_submitted(says, sbatch, here, command):
    text = (here / "p.toml").read_text()
    (here / "p.toml").write_text(text[: text.index("[evidence.probe]")] + "[evidence]\n")
    assert "autotune probe --model CONFIG.json" in says(command, "--profile", "p.toml", "--slurm", code=6)
    assert not sbatch.exists()


def test_a_gpus_profile_asks_for_its_gpus_unless_its_step_is_replayed(on_gpu, says):
    asked = [*WORKERS, "--slurm", "--dry-run", "--ranks", "2"]
    assert "#SBATCH --gres=gpu:2" in says(*asked)
    assert "--gres" not in says(*asked, "--step-time", "60ms")


def test_without_the_profiles_gpu_a_replay_of_its_step_is_named(on_gpu, says, monkeypatch, patterned_dataset):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    err = says(*WORKERS, "--data", patterned_dataset, "--here", code=5)
    assert "autotune workers --profile p.toml --step-time 100ms" in err


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("workers", ["--window", "0"]), ("workers", ["--minutes", "0"]), ("workers", ["--max-workers", "-1"]),
        ("workers", ["--step-time", "0ms"]), ("workers", ["--step-time", "60"]), ("baseline", ["--rounds", "0"]),
        ("baseline", ["--window", "0"]), ("baseline", ["--minutes", "0"]), ("baseline", ["--ranks", "0"]),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_a_usage_error(here, says, command, option):
    assert option[0] in says(command, "--profile", "p.toml", *option, code=2)
