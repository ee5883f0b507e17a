import sys

import pytest

from autotune.cli import run
from autotune.commands.jobs import command_in_job, plain_arguments
from autotune.core.profile import profile_to_toml
from tests.autotune.profiles import example_profile


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        (["probe", "--slurm"], ["probe", "--slurm="]),
        (["probe", "--slurm", "--wait"], ["probe", "--slurm=", "--wait"]),
        (["probe", "--slurm", "site.toml", "--wait"], ["probe", "--slurm", "site.toml", "--wait"]),
        (["probe", "--slurm=site.toml"], ["probe", "--slurm=site.toml"]),
        (["probe", "--", "--slurm"], ["probe", "--", "--slurm"]),
        (["probe", "--slurm", "--", "x"], ["probe", "--slurm=", "--", "x"]),
        ([], []),
    ],
)
def test_an_option_without_its_value_means_the_default(typed, plain):
    assert plain_arguments(typed) == tuple(plain)


@pytest.mark.parametrize("said", [["--slurm", "s.toml"], ["--slurm=s.toml"], ["--slurm="]])
def test_the_job_runs_the_same_command_without_what_makes_it_a_job(said):
    arguments = ["probe", "--model", "m", *said, "--wait", "--dry-run", "--data", "d", "--", "--wait"]
    assert command_in_job(arguments) == ["probe", "--model", "m", "--data", "d", "--", "--wait"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_SITE", raising=False)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    (tmp_path / "p.toml").write_text(profile_to_toml(example_profile()))
    return tmp_path


WORKERS = ["workers", "--profile", "p.toml", "--trial-timeout", "120"]


def test_a_dry_run_prints_the_script_and_writes_nothing(here, capsys, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_DATA", "/data")
    before = sorted(here.rglob("*"))
    assert run([*WORKERS, "--slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    assert script.rstrip().endswith(f"{sys.executable} -m autotune workers --profile p.toml --trial-timeout 120")
    assert "export AUTOTUNE_DATA=/data" in script
    assert "#SBATCH --output=reports/jobs/workers-tiny-%j.log" in script
    assert sorted(here.rglob("*")) == before


def test_the_site_file_is_the_one_that_is_named_else_the_environments_else_the_one_here(here, capsys, monkeypatch):
    for name in ("asked", "told", "site"):
        (here / f"{name}.toml").write_text(f'[slurm]\npartition = "{name}"\n')
    for arguments, expected in ((["--slurm", "asked.toml"], "asked"), (["--slurm"], "site")):
        assert run([*WORKERS, *arguments, "--dry-run"]) == 0
        assert f"--partition={expected}" in capsys.readouterr().out
    monkeypatch.setenv("AUTOTUNE_SITE", "told.toml")
    assert run([*WORKERS, "--slurm", "--dry-run"]) == 0
    assert "--partition=told" in capsys.readouterr().out


def test_a_site_file_that_is_not_there_is_refused(here, capsys):
    assert run([*WORKERS, "--slurm", "none.toml", "--dry-run"]) == 3
    assert "none.toml" in capsys.readouterr().err


def test_a_limit_that_cannot_hold_one_trial_is_refused_before_anything_is_submitted(here, capsys):
    (here / "site.toml").write_text('[slurm]\ntime = "00:02:30"\n')
    assert run([*WORKERS, "--slurm", "--dry-run"]) == 3
    err = capsys.readouterr().err
    assert "00:02:30, cannot hold its start (60 s) and one trial (120 s)" in err
    assert "--trial-timeout 90" in err
    assert run([*WORKERS, "--trial-timeout", "90", "--slurm", "--dry-run"]) == 0


@pytest.mark.parametrize("option", ["--wait", "--dry-run"])
def test_options_of_a_job_mean_nothing_without_one(here, capsys, option):
    assert run([*WORKERS, option]) == 2
    assert "without --slurm" in capsys.readouterr().err


def test_the_sites_processors_per_rank_come_before_the_profiles(here, capsys):
    (here / "site.toml").write_text("[slurm]\ncpus_per_rank = 12\n")
    assert run([*WORKERS, "--ranks", "2", "--slurm", "--dry-run"]) == 0
    assert "#SBATCH --cpus-per-task=24" in capsys.readouterr().out


def test_data_is_prepared_as_one_job(here, capsys):
    arguments = ["data", "prepare", "elf:/usr/bin", "--out", "d1", "--workers", "8", "--slurm", "--dry-run"]
    assert run(arguments) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --cpus-per-task=8" in script
    assert script.rstrip().endswith("-m autotune data prepare elf:/usr/bin --out d1 --workers 8")


def test_a_probe_takes_the_sites_gpus_unless_a_cpu_is_asked_for(here, capsys, patterned_dataset):
    (here / "site.toml").write_text('[slurm]\ngres = "gpu:h100:{count}"\ngpus_per_node = 2\n')
    probe = ["probe", "--model", "bert-mini", "--data", str(patterned_dataset), "--slurm", "--dry-run"]
    assert run(probe) == 0
    assert "#SBATCH --gres=gpu:h100:2" in capsys.readouterr().out
    assert run([*probe, "--device", "cpu"]) == 0
    assert "--gres" not in capsys.readouterr().out
