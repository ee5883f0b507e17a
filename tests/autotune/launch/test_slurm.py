import importlib.metadata
import json
import re
import subprocess

import pytest

from autotune.cli import run
from trainer.config.resolve import resolve
from trainer.formats.manifest import read_manifest


@pytest.fixture
def workdir(workdir_with_data, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    return workdir_with_data


HERE = ["p.toml", "--data", "data", "--out", "runs/one"]
LAUNCH = ["train", *HERE, "--slurm"]


def test_dry_run_prints_valid_script(workdir, says):
    before = sorted(workdir.rglob("*"))
    script = says(*LAUNCH, "--nodes", "4", "--dry-run")
    assert (
        subprocess.run(
            ["/bin/bash", "-n"], input=script, text=True, check=False
        ).returncode
        == 0
    )
    assert "#SBATCH --nodes=4" in script
    assert f"#SBATCH --chdir={workdir}" in script
    # Without an approval a job takes the profile as it is when it starts.
    assert "sha256" not in script
    assert "was approved" not in script
    assert sorted(workdir.rglob("*")) == before


def test_dry_run_with_json_has_the_script(workdir, says):
    printed = json.loads(says(*LAUNCH, "--dry-run", "--json"))
    assert printed["scripts"] == [says(*LAUNCH, "--dry-run")]


def test_warns_of_an_edited_profile(workdir, capsys):
    profile = workdir / "p.toml"
    assert run([*LAUNCH, "--dry-run"]) == 0
    assert "modified" not in capsys.readouterr().err
    profile.write_text(profile.read_text().replace("seed = 0", "seed = 1"))
    assert run([*LAUNCH, "--dry-run"]) == 0
    assert "p.toml was modified after it was tuned" in capsys.readouterr().err


def test_unsubmitted_script_lies_beside_the_run(workdir, says):
    err = says(*LAUNCH, code=5)
    assert (workdir / "runs" / "one" / "train.sbatch").is_file()
    # SLURM writes there before anything runs.
    assert (workdir / "runs" / "one" / "logs").is_dir()
    assert "sbatch not found" in err
    assert "runs/one/train.sbatch" in err


def test_submits_every_job_of_a_chain(workdir, says, sbatch):
    (workdir / "site.toml").write_text("[slurm]\nrequeue = false\n")
    assert json.loads(says(*LAUNCH, "--chain", "3", "--json"))["jobs"] == [
        "1",
        "2",
        "3",
    ]
    submitted = [
        word for link in "123" for word in ("--parsable", "runs/one/train.sbatch", link)
    ]
    assert sbatch.read_text().split() == submitted
    assert (
        "--dependency=singleton"
        in (workdir / "runs" / "one" / "train.sbatch").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "train.max_step=3"], 3, "max_step"),
        (["--require-approved"], 6, "autotune profile approve p.toml --by"),
        (["--time-limit", "30s"], 3, "leaves no time to train"),
        (["--time-limit", "90"], 2, "Write --time-limit 90h"),
        (["--time-limit", "04:00:00"], 2, "'04:00:00' is not a duration"),
        (["--data", "."], 3, "not a dataset"),
        (["--slurm", "none.toml"], 3, "none.toml"),
    ],
)
def test_rejects_unusable_options(workdir, says, arguments, code, words):
    assert words in says(*LAUNCH, *arguments, code=code)
    assert not (workdir / "runs").exists()


@pytest.mark.parametrize(
    ("site", "installed", "has_option"),
    [
        ('python = "/opt/python"', "2.13.0", False),
        ('command_prefix = "env"', "2.13.0", False),
        ("", None, False),
        ("", "2.13.0", True),
    ],
)
def test_torchrun_options_match_torch_of_the_job(
    workdir, monkeypatch, site, installed, has_option, says
):
    (workdir / "site.toml").write_text(f"{site}\n")
    text = (workdir / "p.toml").read_text()
    assert text.count('torch = "') == 1
    (workdir / "p.toml").write_text(re.sub('torch = ".*"', 'torch = "2.11.0"', text))

    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert (
        "--shutdown-timeout" in says(*LAUNCH, "--time-limit", "100h", "--dry-run")
    ) == has_option


def test_rejects_another_dataset(workdir, says):
    text = (workdir / "p.toml").read_text()
    (workdir / "p.toml").write_text(
        text.replace(read_manifest(workdir / "data").dataset_hash, "0" * 64)
    )
    assert "does not match the profile's dataset" in says(*LAUNCH, code=6)


APPROVE = ["profile", "approve", "p.toml", "--by", "reviewer"]


def test_approved_job_checks_approval_at_each_start(workdir, says):
    assert run(APPROVE) == 0
    script = says(*LAUNCH, "--require-approved", "--dry-run")
    preflight = script[script.index(" job preflight") :].split("\n\n")[0]
    assert "--require-approved" in preflight
    assert "--reports reports" in preflight
    sha256 = resolve(workdir / "p.toml", data=workdir / "data").profile_sha256
    assert f"--profile-sha256 {sha256}" in preflight
    assert f"--expect-profile-sha256 {sha256}" in script[script.index("-m trainer") :]
    assert "exactly as approved" in script


@pytest.mark.parametrize(
    "setting",
    [
        "max_steps=7",
        "log_interval_steps=9",
        "data.stage_to='/local'",
        "model.config.hidden_size=64.0",
    ],
)
def test_overridden_setting_is_not_approved(workdir, setting, says):
    says(*APPROVE)
    err = says(*LAUNCH, "--require-approved", "--set", f"train.{setting}", code=6)
    assert f"p.toml: 'train.{setting.partition('=')[0]}' = " in err
    assert not (workdir / "runs").exists()


def test_site_may_require_approval(workdir, says):
    (workdir / "site.toml").write_text("require_approved = true\n")
    says(*LAUNCH, code=6)
    says(*APPROVE)
    assert "--require-approved" in says(
        *LAUNCH, "--set", "train.micro_batch_size=2", "--dry-run"
    )


def test_rejected_profile_is_not_launched(workdir, says):
    (workdir / "site.toml").write_text("require_approved = true\n")
    says("profile", "approve", "p.toml", "--reject", "--by", "another")
    assert "rejected by 'another'" in says(*LAUNCH, code=6)


@pytest.mark.parametrize("source", ["option", "site.toml", "other.toml", "absent.toml"])
def test_local_launch_requires_approval(workdir, says, monkeypatch, source):
    if source in ("site.toml", "other.toml"):
        (workdir / source).write_text("require_approved = true\n")
    if source in ("other.toml", "absent.toml"):
        monkeypatch.setenv("AUTOTUNE_SITE", source)
    code, words = (
        (3, "absent.toml") if source == "absent.toml" else (6, "is not approved (hash")
    )
    option = ["--require-approved"] if source == "option" else []
    assert words in says("train", *HERE, *option, code=code)


@pytest.mark.parametrize("required", [True, False])
def test_approved_run_ignores_job_settings_of_site(workdir, monkeypatch, required):
    started = []
    run_child = "autotune.cluster.torchrun.run_child"
    monkeypatch.setattr(
        run_child, lambda command, environment: started.append(command) or 1
    )
    monkeypatch.setattr("autotune.launch.run_end.PATIENCE_HERE_S", 0.0)
    site = (
        f"require_approved = {str(required).lower()}\npython ="
        ' "/there/python"\nnode_local_path = "/local"\n'
    )
    (workdir / "site.toml").write_text(site)
    assert run(APPROVE) == 0
    assert run(["train", *HERE]) == 1
    sha256 = resolve(workdir / "p.toml", data=workdir / "data").profile_sha256
    assert (f"--expect-profile-sha256 {sha256}" in " ".join(started[0])) == required
    assert "/there/python" not in started[0]
    assert "stage_to" not in " ".join(started[0])
