import json

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from tests.autotune.search.test_scaling import probed


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "SLURM_NNODES", "AUTOTUNE_DATA"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(probed()))
    return path


def test_a_prediction_is_printed_and_kept(profile, capsys):
    command = ["scale", "--profile", str(profile), "--nodes", "1,2,8", "--bandwidth", "25Gbit"]
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "Useful nodes at this global batch" in out
    assert "assumed, 80% of 25 Gbit/s" in out
    assert "measured" not in out.split("Computing:")[0]
    kept = json.loads((profile.parent / "reports" / "p" / "scaling-predicted.json").read_text())
    assert [row["nodes"] for row in kept["rows"]] == [1, 2, 8]


def test_two_profiles_stand_side_by_side(profile, capsys):
    both = ["--profile", str(profile), "--profile", str(profile)]
    assert run(["scale", *both, "--nodes", "1,2", "--bandwidth", "1Gbit", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--nodes", "1,two"], 2, "--nodes 1,2,4"),
        (["--bandwidth", "25"], 2, "such as 25Gbit"),
        (["--bandwidth", "25Gbit", "--latency", "25"], 2, "such as 25us"),
        ([], 3, "--bandwidth 25Gbit"),
        (["--bandwidth", "25Gbit", "--nodes", "100000"], 3, "--global-batch-tokens"),
    ],
)
def test_wrong_turns_say_what_to_do(profile, capsys, options, code, said):
    assert run(["scale", "--profile", str(profile), *options]) == code
    assert said in capsys.readouterr().err
