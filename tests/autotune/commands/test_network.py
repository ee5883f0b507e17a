import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from tests.autotune.profiles import example_profile
from tests.autotune.search.plans import without_evidence
from tests.conftest import write_dataset


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Probed elsewhere, beside a dataset; no cluster anywhere near."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "AUTOTUNE_DATA"):
        monkeypatch.delenv(name, raising=False)
    write_dataset(tmp_path / "data", [[5, 6, 7, 8]] * 20, vocab_size=128)
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(example_profile()))
    return path


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 5, "one rank alone sends nothing"),
        (["--nodes", "2"], 3, "Submit it as a job of 2 nodes"),
        (["--slurm"], 5, "sbatch is not here"),
        (["--wait"], 2, "--wait means nothing without --slurm"),
    ],
)
def test_wrong_turns_say_what_to_do_and_start_nothing(profile, capsys, options, code, said):
    assert run(["network", "--profile", str(profile), "--data", "data", *options]) == code
    assert said in capsys.readouterr().err


def test_a_profile_that_was_not_probed_is_refused(profile, capsys):
    profile.write_text(profile_to_toml(without_evidence(example_profile())))
    assert run(["network", "--profile", str(profile), "--data", "data"]) == 6
    assert "autotune probe" in capsys.readouterr().err


def test_the_job_has_two_nodes_and_runs_once_on_the_first(profile, capsys):
    command = ["network", "--profile", str(profile), "--data", "data", "--slurm", "--dry-run"]
    assert run(command) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in script
    assert "srun" not in script.split("set -u")[1].replace("starts what it needs", "")
    assert "autotune network --profile" in script
    assert "--dry-run" not in script
