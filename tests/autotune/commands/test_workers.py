import json
import shlex
import sys
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from tests.autotune.profiles import example_profile


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("AUTOTUNE_DATA", "SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def profile(here):
    path = here / "p.toml"
    path.write_text(profile_to_toml(example_profile()))
    return path


@pytest.fixture
def sbatch(here, monkeypatch):
    """A scripted sbatch on PATH, which writes down what it was given."""
    place = here / "bin"
    place.mkdir()
    (place / "sbatch").write_text(f'#!/bin/sh\necho "$@" > {here}/given\necho 4711\n')
    (place / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    return here / "given"


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["autotune", *arguments])
    return run(list(arguments))


def written(here: Path) -> Path:
    """The one script that was written."""
    (script,) = (here / "reports" / "jobs").glob("workers-tiny-*.sbatch")
    return script


def test_a_login_node_is_refused_with_the_job_to_submit_instead(capsys, monkeypatch, profile, sbatch):
    assert call(monkeypatch, "workers", "--profile", str(profile)) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert "looks like a login node" in err
    assert f"autotune workers --profile {profile} --slurm" in err
    assert "--here" in err
    assert not sbatch.exists()


def test_inside_a_job_a_node_with_slurm_is_no_login_node(capsys, monkeypatch, profile, sbatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert call(monkeypatch, "workers", "--profile", str(profile), "--data", "nowhere") == 3
    assert "nowhere" in capsys.readouterr().err


def test_a_login_node_is_measured_on_where_the_user_insists(capsys, monkeypatch, profile, sbatch):
    assert call(monkeypatch, "workers", "--profile", str(profile), "--data", "nowhere", "--here") == 3
    assert "login node" not in capsys.readouterr().err


def test_a_profile_without_a_probe_is_refused_before_anything_is_submitted(capsys, monkeypatch, profile, sbatch, here):
    text = profile.read_text()
    profile.write_text(text[: text.index("[evidence.probe]")] + "[evidence]\n")
    (here / "site.toml").write_text("")
    assert call(monkeypatch, "workers", "--profile", str(profile), "--slurm", "site.toml") == 6
    assert "autotune probe --model CONFIG.json" in capsys.readouterr().err
    assert not sbatch.exists()


@pytest.mark.parametrize("spelling", [["--slurm", "site.toml"], ["--slurm=site.toml"]])
def test_a_submitted_job_says_the_same_but_not_to_submit_it(capsys, monkeypatch, profile, sbatch, here, spelling):
    (here / "site.toml").write_text('[slurm]\npartition = "gpu"\ncpus_per_task = 12\n')
    arguments = ["workers", "--profile", str(profile), *spelling, "--data", "a dir/$X", "--minutes", "5"]
    assert call(monkeypatch, *arguments) == 0
    out = capsys.readouterr().out
    script = written(here)
    assert sbatch.read_text().split() == ["--parsable", str(script.relative_to(here))]
    lines = script.read_text().replace("\\\n", "").splitlines()
    (step,) = [line for line in lines if line.startswith("srun ")]
    said = shlex.split(step)
    expected = ["workers", "--profile", str(profile), "--data", "a dir/$X", "--minutes", "5"]
    assert said[-len(expected) :] == expected
    assert "--slurm" not in step
    assert "#SBATCH --cpus-per-task=12" in lines
    assert "#SBATCH --partition=gpu" in lines
    assert not any("--gres" in line for line in lines)  # it was probed on a CPU
    assert "4711" in out
    assert str(script.relative_to(here)) in out


def test_a_gpus_profile_asks_for_its_gpus_unless_its_step_is_replayed(monkeypatch, profile, sbatch, here):
    (here / "site.toml").write_text("")
    probed = example_profile()
    on_gpu = probed.model_copy(update={"train": probed.train.model_copy(update={"device": "cuda"})})
    profile.write_text(profile_to_toml(on_gpu))
    asked = ["workers", "--profile", str(profile), "--slurm", "site.toml", "--ranks", "2"]
    assert call(monkeypatch, *asked) == 0
    script = written(here)
    assert "#SBATCH --gres=gpu:2" in script.read_text()
    script.unlink()
    assert call(monkeypatch, *asked, "--step-time", "60ms") == 0
    assert "--gres" not in written(here).read_text()


def test_a_submitted_job_is_told_as_json_where_that_is_asked_for(capsys, monkeypatch, profile, sbatch, here):
    (here / "site.toml").write_text("")
    assert call(monkeypatch, "workers", "--profile", str(profile), "--slurm", "site.toml", "--json") == 0
    assert json.loads(capsys.readouterr().out)["job"] == "4711"


def test_without_the_profiles_gpu_a_replay_of_its_step_is_named(capsys, monkeypatch, profile, patterned_dataset):
    probed = example_profile()
    on_gpu = probed.model_copy(update={"train": probed.train.model_copy(update={"device": "cuda"})})
    profile.write_text(profile_to_toml(on_gpu))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # SLURM's commands may be installed here
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert call(monkeypatch, "workers", "--profile", str(profile), "--data", str(patterned_dataset)) == 5
    err = capsys.readouterr().err
    assert f"autotune workers --profile {profile} --step-time 100ms" in err


@pytest.mark.parametrize(
    "option", [["--window", "0"], ["--minutes", "0"], ["--max-workers", "-1"],
               ["--step-time", "0ms"], ["--step-time", "60"]]
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_a_usage_error(capsys, monkeypatch, profile, option):
    assert call(monkeypatch, "workers", "--profile", str(profile), *option) == 2
    assert option[0] in capsys.readouterr().err
