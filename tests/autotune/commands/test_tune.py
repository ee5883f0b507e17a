import json
import sys

import pytest

from autotune.cli import run
from autotune.commands import tune

PROBED = {"models": [{"profile": "out/a-cpu.toml", "local_ranks": 2}, {"profile": "out/b-cpu.toml", "local_ranks": 1}]}


class Said:
    """The other commands of this program, which only note that they were called."""

    def __init__(self, code_of=None):
        self.calls, self.code_of = [], code_of or {}

    def __call__(self, words, **options):
        assert words[:3] == [sys.executable, "-m", "autotune"]
        self.calls.append(words[3:])
        self.returncode = self.code_of.get(words[3], 0)
        return self

    def communicate(self):
        return json.dumps(PROBED if self.calls[-1][0] == "probe" else {}), None


@pytest.fixture
def said(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)
    called = Said()
    monkeypatch.setattr(tune.subprocess, "Popen", called)
    return called


TUNE = ["tune", "--model", "a", "--model", "b", "--data", "data", "--memory", "1GiB"]


def test_stages_follow_the_order_of_tuning_and_all_models_share_one_probe(said, capsys):
    assert run([*TUNE, "--json"]) == 0
    stages = ["probe", "workers", "network", "baseline", "workers", "baseline", "report"]
    assert [call[0] for call in said.calls] == stages
    probe = said.calls[0]
    assert probe.count("--model") == 2
    assert probe[probe.index("--memory") + 1] == "1GiB"
    assert said.calls[2][said.calls[2].index("--ranks") + 1] == "2"  # one rank alone has nothing to exchange
    assert said.calls[3][said.calls[3].index("--minutes") + 1] == "2"  # a small share of what tuning takes
    found = json.loads(capsys.readouterr().out)
    assert found == {"profiles": ["out/a-cpu.toml", "out/b-cpu.toml"], "report": "reports/a-cpu/report.html"}


def test_stages_can_be_left_out(said):
    assert run([*TUNE, "--no-workers", "--no-network", "--no-baseline"]) == 0
    assert [call[0] for call in said.calls] == ["probe", "report"]


def test_a_stage_that_fails_ends_the_tuning_with_its_code_and_the_command_that_goes_on(said, capsys):
    said.code_of = {"workers": 75}
    assert run(TUNE) == 75
    assert [call[0] for call in said.calls] == ["probe", "workers"]
    err = capsys.readouterr().err
    assert "workers ended with code 75" in err
    assert "to go on from here: autotune tune --model a --model b" in err


def test_in_a_job_the_command_that_goes_on_is_to_be_submitted_again(said, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said.code_of = {"workers": 75}
    assert run([*TUNE, "--out", "my profiles"]) == 75
    err = capsys.readouterr().err
    assert "submit it again, with --slurm as before: autotune tune --model a" in err
    assert "--out 'my profiles'" in err


def test_all_models_are_one_job_of_one_node(said, capsys):
    assert run([*TUNE, "--slurm", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1" in script
    assert "tune --model a --model b" in script
    assert said.calls == []


def test_the_network_of_two_nodes_is_a_second_job_on_request(said, capsys):
    assert run([*TUNE, "--between-nodes", "--slurm", "--dry-run"]) == 0
    first, second = capsys.readouterr().out.split("\n\n#!/bin/bash")
    assert "#SBATCH --nodes=1" in first
    assert "#SBATCH --nodes=2" in second
    assert "tune-between-nodes reports/jobs/tune-JOB.json --data data --minutes 10" in second
    assert said.calls == []


def test_without_a_job_there_is_nothing_between_nodes(said, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert run([*TUNE, "--between-nodes"]) == 2
    assert "Add --slurm" in capsys.readouterr().err
    assert said.calls == []


def test_a_job_leaves_what_it_found_to_the_second_one(said, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run([*TUNE, "--between-nodes"]) == 0
    said.calls.clear()
    command = ["tune-between-nodes", "reports/jobs/tune-7.json", "--data", "data", "--minutes", "10"]
    assert run([*command, "--trial-timeout", "60", "--reports", "reports"]) == 0
    # The exchange may be another one then, so what the settings are worth is measured again.
    assert [call[0] for call in said.calls] == ["network", "baseline", "network", "baseline", "report"]
    assert [call[2] for call in said.calls[:4:2]] == ["out/a-cpu.toml", "out/b-cpu.toml"]
    assert said.calls[4][2:4] == ["out/a-cpu.toml", "out/b-cpu.toml"]
