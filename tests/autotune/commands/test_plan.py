import json
from pathlib import Path

import pytest

from autotune.cli import run
from autotune.core.profile import profile_to_toml
from tests.autotune.search.plans import on_gpus, traced

SHIPPED = Path(__file__).parents[3] / "profiles" / "bert-mini-cpu.toml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATA", raising=False)


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(profile_to_toml(on_gpus(traced())))
    return str(path)


def plan(capsys, *arguments: str, code: int = 0) -> str:
    assert run(["plan", *arguments]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def test_a_shipped_profile_is_planned_from_what_was_measured(capsys):
    text = plan(capsys, "--profile", str(SHIPPED))
    assert "measured" in text
    assert "CPU-hours" in text
    assert "GPU" not in text.split("rate:")[0]
    assert len(text.splitlines()) <= 45
    assert text.splitlines()[-1].startswith("next: autotune launch local")


def test_a_price_becomes_a_cost_with_bounds(capsys, profile):
    found = json.loads(
        plan(capsys, "--profile", profile, "--tokens", "1e9", "--nodes", "2", "--price-per-gpu-hour", "2.5", "--json")
    )
    assert found["cost"]["value"] == pytest.approx(2.5 * found["device_hours"]["value"])
    assert found["cost"]["low"] < found["cost"]["value"] < found["cost"]["high"]


@pytest.mark.system
def test_the_papers_cluster_fits_a_screen_and_warns_of_its_batch(capsys, warm_server):
    text = plan(
        capsys, "--model", "bert-120m", "--gpu", "h100-nvl-94gb", "--nodes", "128", "--gpus-per-node", "2",
        "--tokens", "45.2B", "--price-per-gpu-hour", "2.5",
    )  # fmt: skip
    lines = text.splitlines()
    assert len(lines) <= 45
    assert max(len(line) for line in lines) <= 100
    assert "128 nodes are" in text
    assert "ModernBERT" in text
    assert lines[-1] == "next: autotune probe --model bert-120m --data DIR"


PLANNED = ["--profile", "p.toml"]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([*PLANNED, "--tokens", "1B", "--hours", "3"], 2, "--tokens and --hours each say how long"),
        ([*PLANNED, "--tokens", "2X"], 2, "such as 45.2B, 2T or 1e22"),
        ([*PLANNED, "--hours", "0"], 2, "--hours 0: not a positive number"),
        ([*PLANNED, "--hours", "inf"], 2, "not a positive number"),
        ([*PLANNED, "--epochs", "3"], 3, "--data DIR"),
        ([*PLANNED, "--gpu", "l40"], 3, "Did you mean l40s-48gb"),
        ([*PLANNED, "--model", "bert-120m"], 2, "and both were given"),
        ([*PLANNED, "--seq-length", "128"], 2, "a profile has its own"),
        ([*PLANNED, "--bandwidth", "25"], 2, "such as 25Gbit"),
        ([*PLANNED, "--data", "nowhere"], 3, "not a directory"),
        ([], 2, "--model bert-120m --gpu h100-nvl-94gb"),
        (["--model", "bert-12m", "--gpu", "h200", "--hours", "1"], 3, "Did you mean 'bert-120m'?"),
        (["--model", "bert-120m", "--hours", "1"], 2, "--gpu with one of"),
        (["--model", "bert-120m", "--gpu", "h200"], 2, "--epochs 3 --data DIR"),
        (["--profile", "none.toml"], 3, "none.toml"),
        (["--profile", str(SHIPPED), "--price-per-gpu-hour", "3"], 2, "has no GPU"),
    ],
)
@pytest.mark.usefixtures("profile")
def test_wrong_turns_say_what_to_do(capsys, options, code, said):
    assert said in plan(capsys, *options, code=code)
