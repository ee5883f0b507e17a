"""Measuring commands as SLURM jobs, and on login nodes."""

import json
import shlex
import sys

import pytest

from autotune.console.arguments import plain_arguments
from autotune.console.slurm_job import command_in_job
from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import but, example_profile

WORKERS = ["workers", "p.toml", "--trial-timeout", "120s"]


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        (["probe", "--slurm"], ["probe", "--slurm="]),
        (["probe", "--slurm", "--wait"], ["probe", "--slurm=", "--wait"]),
        (
            ["probe", "--slurm", "site.toml", "--wait"],
            ["probe", "--slurm", "site.toml", "--wait"],
        ),
        (["probe", "--slurm=site.toml"], ["probe", "--slurm=site.toml"]),
        (["workers", "--slurm", "p.toml"], ["workers", "--slurm=", "p.toml"]),
        (
            ["workers", "--slurm", "s.toml", "p.toml"],
            ["workers", "--slurm", "s.toml", "p.toml"],
        ),
        (["probe", "--", "--slurm"], ["probe", "--", "--slurm"]),
        (["probe", "--slurm", "--", "x"], ["probe", "--slurm=", "--", "x"]),
        ([], []),
    ],
)
def test_option_without_value_means_default(typed, plain):
    assert plain_arguments(typed) == tuple(plain)


@pytest.mark.parametrize(
    "options",
    [["--slurm", "s.toml"], ["--slurm=s.toml"], ["--slurm="]],
    ids=["value", "value after =", "no value"],
)
def test_job_runs_the_same_command(options):
    arguments = [
        "probe",
        "--model",
        "m",
        *options,
        "--wait",
        "--dry-run",
        "--data",
        "d",
        "--",
        "--wait",
    ]
    assert command_in_job(arguments) == [
        "probe",
        "--model",
        "m",
        "--data",
        "d",
        "--",
        "--wait",
    ]


def test_dry_run_with_json_has_the_scripts(workdir, says, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_DATA", "/data")
    printed = json.loads(says(*WORKERS, "--slurm", "--dry-run", "--json"))
    (script,) = printed["scripts"]
    # The job prints JSON as well.
    assert script.replace(" --json", "") == says(*WORKERS, "--slurm", "--dry-run")


def test_dry_run_writes_nothing(workdir, says, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_DATA", "/data")
    before = sorted(workdir.rglob("*"))
    script = says(*WORKERS, "--slurm", "--dry-run")
    assert script.startswith("#!/bin/bash\n")
    assert script.rstrip().endswith(
        f"{sys.executable} -P -m autotune workers p.toml --trial-timeout 120s"
    )
    assert "export AUTOTUNE_DATA=/data" in script
    assert "#SBATCH --output=reports/jobs/workers-tiny-%j.log" in script
    assert sorted(workdir.rglob("*")) == before


def test_submits_what_was_typed(says, sbatch, workdir):
    (workdir / "site.toml").write_text(
        '[slurm]\npartition = "gpu"\ncpus_per_task = 12\n'
    )
    typed = ["workers", "p.toml", "--data", "a dir/$X", "--time-limit", "5min"]
    out = says(*typed, "--slurm", "site.toml")
    (script,) = (workdir / "reports" / "jobs").glob("workers-tiny-*.sbatch")
    assert sbatch.read_text().split() == [
        "--parsable",
        str(script.relative_to(workdir)),
    ]
    lines = script.read_text().replace("\\\n", "").splitlines()
    (step,) = [line for line in lines if line.startswith("srun ")]
    assert shlex.split(step)[-len(typed) :] == typed
    assert "--slurm" not in step
    assert {"#SBATCH --cpus-per-task=12", "#SBATCH --partition=gpu"} <= set(lines)
    assert not any("--gres" in line for line in lines)  # it was probed on a CPU
    assert out.startswith("job               1\nexpected minutes  about 6, at most ")
    assert str(script.relative_to(workdir)) in out
    assert json.loads(says(*typed, "--slurm=site.toml", "--json"))["job"] == "2"


def test_named_site_file_takes_precedence(workdir, says, monkeypatch):
    assert "--partition=" not in says(*WORKERS, "--slurm", "--dry-run")
    for name in ("asked", "told", "site"):
        (workdir / f"{name}.toml").write_text(f'[slurm]\npartition = "{name}"\n')
    assert "--partition=site" in says(*WORKERS, "--slurm", "--dry-run")
    monkeypatch.setenv("AUTOTUNE_SITE", "told.toml")
    for arguments, expected in (([], "told"), (["asked.toml"], "asked")):
        assert f"--partition={expected}" in says(
            *WORKERS, "--slurm", *arguments, "--dry-run"
        )
    assert "none.toml" in says(*WORKERS, "--slurm", "none.toml", "--dry-run", code=3)


def test_rejects_time_limit_too_short_for_a_trial(workdir, says):
    (workdir / "site.toml").write_text('[slurm]\ntime = "00:02:30"\n')
    err = says(*WORKERS, "--slurm", "--dry-run", code=3)
    assert "00:02:30, cannot hold its start (60 s) and one trial (120 s)" in err
    assert "--trial-timeout 90s" in err
    says(*WORKERS, "--trial-timeout", "90s", "--slurm", "--dry-run")


def test_job_requests_cpus_of_the_profile(workdir, says, patterned_dataset):
    assert "#SBATCH --cpus-per-task=2\n" in says(
        "baseline", "p.toml", "--slurm", "--dry-run"
    )


def test_job_requests_cpus_of_the_command(workdir, says):
    script = says(
        "data",
        "prepare",
        "elf:/usr/bin",
        "--out",
        "d1",
        "--workers",
        "8",
        "--slurm",
        "--dry-run",
    )
    assert "#SBATCH --cpus-per-task=8" in script
    assert script.rstrip().endswith(
        "-P -m autotune data prepare elf:/usr/bin --out d1 --workers 8"
    )


def test_job_requests_resources_of_the_site(workdir, says, patterned_dataset):
    (workdir / "site.toml").write_text(
        '[slurm]\ncpus_per_rank = 12\ngres = "gpu:h100:{count}"\ngpus_per_node = 2\n'
    )
    assert "#SBATCH --cpus-per-task=24" in says(
        *WORKERS, "--ranks", "2", "--slurm", "--dry-run"
    )
    probe = [
        "probe",
        "--model",
        "bert-mini",
        "--data",
        patterned_dataset,
        "--slurm",
        "--dry-run",
    ]
    assert "#SBATCH --gres=gpu:h100:2" in says(*probe)
    assert "--gres" not in says(*probe, "--device", "cpu")


def test_job_requests_gpus_of_the_profile(
    workdir, says, monkeypatch, patterned_dataset
):
    (workdir / "p.toml").write_text(
        profile_to_toml(but(example_profile(), train={"device": "cuda"}))
    )
    arguments = [*WORKERS, "--slurm", "--dry-run", "--ranks", "2"]
    assert "#SBATCH --gres=gpu:2" in says(*arguments)
    assert "--gres" not in says(*arguments, "--step-time", "60ms")


def test_missing_gpu_suggests_replaying_the_step(
    workdir, says, monkeypatch, patterned_dataset
):
    (workdir / "p.toml").write_text(
        profile_to_toml(but(example_profile(), train={"device": "cuda"}))
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "autotune workers p.toml --step-time 100ms" in says(
        *WORKERS, "--data", patterned_dataset, "--here", code=5
    )


def test_network_job_has_two_nodes(workdir, says):
    script = says("network", "p.toml", "--data", "data", "--slurm", "--dry-run")
    assert "#SBATCH --nodes=2" in script
    assert "srun" not in script.split("set -u")[1].replace("starts what it needs", "")
    assert "autotune network p.toml" in script
    assert "--dry-run" not in script


@pytest.mark.parametrize(
    "command", ["workers", "confirm", "baseline", "network", "probe", "tune"]
)
def test_login_node_suggests_a_job(says, sbatch, patterned_dataset, command):
    subject = ["--model", "bert-mini"] if command in ("probe", "tune") else ["p.toml"]
    typed = [
        command,
        *subject,
        "--data",
        f"{patterned_dataset}",
        "--reports",
        "my reports",
    ]
    err = says(*typed, code=5)
    assert "looks like a login node" in err
    assert err.endswith("\n  docs: docs/faq.md#login-node\n")
    assert (
        f"autotune {shlex.join(typed)} --slurm. To measure here all the same: --here."
        in err
    )
    assert not sbatch.exists()


def test_compute_node_is_no_login_node(workdir, says, sbatch, monkeypatch):
    missing = [*WORKERS, "--data", "nowhere"]
    assert "nowhere" in says(*missing, "--here", code=3)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert "nowhere" in says(*missing, code=3)
