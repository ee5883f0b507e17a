"""What commands really answer machines, and files that runs really write, held against their schemas."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from autotune.measure.host import SystemHost
from autotune.measure.nvml import NvmlMonitor
from autotune.search.site import fingerprint, open_site
from benchmarks.schemas import PLACE
from tests.autotune.commands.report.test_compare import _write_run
from tests.autotune.profiles import example_profile
from trainer.dataset import read_manifest

TINY = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
SHIPPED = sorted(Path("profiles").resolve().glob("*-cpu.toml"))
ESTIMATED = str(Path("profiles").resolve() / "bert-120m-h100-nvl-94gb.toml")


@pytest.fixture
def here(tmp_path, monkeypatch, patterned_dataset):
    """A directory with data, a profile of this machine, another one, and two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    (tmp_path / "data").symlink_to(patterned_dataset)
    found, monitor = example_profile(), NvmlMonitor()
    site = open_site("cpu", tmp_path / "data", SystemHost(), monitor)
    monitor.close()
    manifest = read_manifest(patterned_dataset)
    data = found.train.data.model_copy(update={"path": "data", "dataset_hash": manifest.dataset_hash})
    train = found.train.model_copy(update={"data": data, "global_batch_rows": 122})
    made_here = found.model_copy(update={"train": train, "fingerprint": fingerprint(site, train.model, manifest, None)})
    (tmp_path / "p.toml").write_text(profile_to_toml(made_here))
    wider = made_here.model_copy(update={"train": train.model_copy(update={"micro_batch_rows": 1})})
    (tmp_path / "q.toml").write_text(profile_to_toml(wider))
    _write_run("runs/a", 1000)
    _write_run("runs/b", 900, seed=1)
    (tmp_path / "local").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"word{number} and more\n" for number in range(300)))
    return tmp_path


def _check(name, value):
    schema = json.loads((PLACE / f"{name}.json").read_text())
    errors = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(value)
    ]
    assert errors == []


QUICK = [
    ("doctor", ["doctor"]),
    ("data-inspect", ["data", "inspect", "data"]),
    ("data-stage", ["data", "stage", "data", "--to", "local"]),
    ("profile-show", ["profile", "show", "p.toml"]),
    ("profile-diff", ["profile", "diff", "p.toml", "q.toml"]),
    ("profile-diff", ["profile", "diff", "p.toml", str(SHIPPED[0])]),
    ("profile-verify", ["profile", "verify", "p.toml"]),
    ("profile-explain", ["profile", "explain", "p.toml"]),
    ("profile-explain", ["profile", "explain", str(SHIPPED[0])]),
    ("profile-explain", ["profile", "explain", ESTIMATED]),
    ("profile-show", ["profile", "show", ESTIMATED]),
    ("profile-diff", ["profile", "diff", ESTIMATED, str(SHIPPED[0])]),
    ("advise", ["advise", ESTIMATED]),
    ("advise", ["advise", "p.toml"]),
    ("advise", ["advise", "runs/a"]),
    ("advise", ["advise", "--rules"]),
    ("report-build", ["report", "build", "p.toml", "--run", "runs/a"]),
    ("report-compare", ["report", "compare", "runs/a", "runs/b", "--fail-if-slower", "50%"]),
    ("report-compare", ["report", "compare", "p.toml", "q.toml"]),
    ("report-review", ["report", "review", "p.toml", "--reject", "--by", "reviewer", "--note", "why not"]),
    ("launch-status", ["launch", "status"]),
    ("launch-slurm", ["launch", "slurm", "--profile", "p.toml", "--out", "runs/c"]),
    ("export", ["export", "p.toml", "--to", "hf-trainer"]),
    ("export", ["export", str(SHIPPED[0]), "--to", "hf-trainer"]),
    ("scale", ["scale", "--profile", str(SHIPPED[0]), "--bandwidth", "25Gbit", "--nodes", "1,2"]),
]


@pytest.mark.parametrize(("name", "arguments"), QUICK, ids=[" ".join(arguments[:2]) for _, arguments in QUICK])
def test_an_answer_is_as_its_schema_says(here, capsys, name, arguments):
    assert run([*arguments, "--json"]) == 0
    _check(name, json.loads(capsys.readouterr().out))


def test_a_dataset_that_was_just_made_is_told_as_the_schemas_say(here, capsys):
    for name in ("prepare", "verify"):
        arguments = ["prepare", "text:text", "--out", "made"] if name == "prepare" else [name, "made"]
        assert run(["data", *arguments, "--json"]) == 0
        _check(f"data-{name}", json.loads(capsys.readouterr().out))


def test_what_apply_wrote_is_told_as_the_schema_says(here, capsys):
    assert run(["advise", "p.toml", "--apply", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["applied"] is not None
    _check("advise", told)


def test_files_of_a_run_are_as_their_schemas_say(here):
    place = here / "runs" / "a"
    _check("file-run", json.loads((place / "run.json").read_text()))
    _check("file-run-exit", json.loads((place / "exit.json").read_text()))
    rows = (place / "steps.jsonl").read_text().splitlines()
    assert rows
    for row in rows:
        _check("file-run-steps", json.loads(row))


def test_files_that_people_share_are_as_their_schemas_say(here, capsys):
    _check("file-profile", tomllib.loads((here / "p.toml").read_text()))
    _check("file-dataset", json.loads((here / "data" / "manifest.json").read_text()))
    assert run(["report", "review", "p.toml", "--approve", "--by", "reviewer"]) == 0
    _check("file-review", json.loads((here / "reports" / "p" / "review.json").read_text()))
    capsys.readouterr()


@pytest.mark.usefixtures("warm_server")
def test_an_estimate_and_a_plan_are_as_their_schemas_say(here, capsys):
    estimate = ["estimate", "--model", "bert-mini", "--memory", "1GiB", "--device", "cpu", "--seq-length", "32"]
    assert run([*estimate, "--data", "data", "--json"]) == 0
    _check("estimate", json.loads(capsys.readouterr().out))
    assert run(["plan", "--profile", str(SHIPPED[0]), "--tokens", "1M", "--json"]) == 0
    _check("plan", json.loads(capsys.readouterr().out))


def test_a_job_that_a_command_submits_is_as_the_schema_says(here, capsys, monkeypatch, tmp_path):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 41\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    assert run(["workers", "--profile", "p.toml", "--slurm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"] == "41"
    for name in ("workers", "probe", "tune"):
        _check(name, told)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_server")
def test_what_measuring_commands_answer_is_as_their_schemas_say(here, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # no sbatch: this is no login node
    (here / "tiny.json").write_text(json.dumps(TINY))
    shape = ["--model", "tiny.json", "--data", "data", "--device", "cpu", "--memory", "256MiB", "--seq-length", "32"]
    few = ["--max-rows", "4", "--window", "0.2"]
    probe = [*shape, "--max-rows", "4", "--out", "tiny.toml"]
    tune = [*shape, *few, "--minutes", "0.2", "--skip", "network", "--skip", "baseline", "--out", "tuned"]
    told = {
        "probe": ["probe", *probe],
        "workers": ["workers", "--profile", "tiny.toml", "--data", "data", "--window", "0.2", "--minutes", "0.2"],
        "baseline": ["baseline", "--profile", "tiny.toml", "--data", "data", "--window", "0.2", "--minutes", "0.2"],
        "tune": ["tune", *tune],
    }
    for name, arguments in told.items():
        assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
        _check(name, json.loads(capsys.readouterr().out))
