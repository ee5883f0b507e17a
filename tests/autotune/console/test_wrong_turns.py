"""Invalid requests are rejected before anything starts, with the next step."""

from pathlib import Path

import pytest

from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.profiles import example_profile
from tests.autotune.plan.plans import on_gpus, traced, without_evidence
from tests.autotune.subjects.mlm.network.test_scaling import probed

SHIPPED = str(Path(__file__).parents[3] / "profiles" / "bert-mini-cpu.toml")
PLAN = ["plan", "planned.toml"]
PREDICT = ["network", "--predict", "scaled.toml"]
NETWORK = ["network", "--data", "corpus"]
WORKERS = ["workers", "p.toml"]
CONFIRM = ["confirm", "p.toml"]
BASELINE = ["baseline", "p.toml"]


@pytest.fixture(autouse=True)
def profiles(workdir, monkeypatch, patterned_dataset):
    """Write profiles of each kind and a dataset into the working directory."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    examples = {
        "planned": on_gpus(traced()),
        "scaled": probed(),
        "unprobed": without_evidence(example_profile()),
    }
    for name, profile in examples.items():
        (workdir / f"{name}.toml").write_text(profile_to_toml(profile))
    (workdir / "corpus").symlink_to(patterned_dataset)
    return workdir


WRONG_TURNS = [
    (
        PLAN,
        ["--tokens", "1B", "--duration", "3h"],
        2,
        "--tokens cannot be used with --duration",
    ),
    (PLAN, ["--tokens", "2X"], 2, "Write --tokens 45.2B"),
    (PLAN, ["--duration", "0h"], 2, "--duration 0h is not positive"),
    (PLAN, ["--epochs", "3"], 3, "--data DIR"),
    (PLAN, ["--gpu", "l40"], 3, "Did you mean l40s-48gb"),
    (
        PLAN,
        ["--model", "bert-120m"],
        2,
        "--model cannot be used with 'planned.toml'",
    ),
    (PLAN, ["--seq-length", "128"], 2, "a profile sets its own"),
    (PLAN, ["--bandwidth", "25"], 2, "next: Write --bandwidth 25Gbit"),
    (PLAN, ["--data", "nowhere"], 3, "dataset not found: nowhere"),
    (["plan"], [], 2, "--model bert-120m --gpu h100-nvl-94gb"),
    (
        ["profile", "export", "planned.toml"],
        [],
        2,
        "next: autotune profile export planned.toml --to hf-trainer",
    ),
    (
        ["plan"],
        ["--model", "bert-12m", "--gpu", "h200", "--duration", "1h"],
        3,
        "Did you mean 'bert-120m'?",
    ),
    (
        ["plan"],
        ["--model", "bert-120m", "--duration", "1h"],
        2,
        "--gpu with one of",
    ),
    (
        ["plan"],
        ["--model", "bert-120m", "--gpu", "h200"],
        2,
        "--epochs 3 --data DIR",
    ),
    (["plan"], ["none.toml"], 3, "none.toml"),
    (["plan"], [SHIPPED, "--price-per-gpu-hour", "3"], 2, "has no GPU"),
    (PREDICT, ["--nodes", "1,two"], 2, "--nodes 1,2,4"),
    (PREDICT, ["--bandwidth", "many"], 2, "'many' is not a line rate"),
    (
        PREDICT,
        ["--bandwidth", "25Gbit", "--latency", "25"],
        2,
        "next: Write --latency 25us",
    ),
    (PREDICT, [], 3, "--bandwidth 25Gbit"),
    (
        PREDICT,
        ["--bandwidth", "25Gbit", "--nodes", "100000"],
        3,
        "--global-batch-tokens",
    ),
    (NETWORK, ["p.toml", "--nodes", "1,2"], 2, "'1,2' requires --predict"),
    (
        NETWORK,
        ["p.toml", "--bandwidth", "25Gbit"],
        2,
        "--bandwidth requires --predict",
    ),
    (NETWORK, ["p.toml"], 5, "requires at least 2 GPUs"),
    (NETWORK, ["p.toml", "--nodes", "2"], 3, "Submit a job of 2 nodes"),
    (NETWORK, ["p.toml", "--slurm"], 5, "sbatch not found"),
    (NETWORK, ["p.toml", "--wait"], 2, "--wait means nothing without --slurm"),
    (NETWORK, ["unprobed.toml"], 6, "autotune probe"),
    (WORKERS, ["--dry-run"], 2, "means nothing without --slurm"),
    (
        WORKERS,
        ["--window", "3"],
        2,
        "--window '3' has no unit\n  next: Write --window 3s",
    ),
    (WORKERS, ["--time-limit", "0min"], 2, "--time-limit '0min' is less than 1s"),
    (WORKERS, ["--max-workers", "-1"], 2, "--max-workers"),
    (WORKERS, ["--step-time", "0ms"], 2, "--step-time"),
    (WORKERS, ["--step-time", "60"], 2, "Write --step-time 60ms"),
    (CONFIRM, ["--rounds", "2"], 2, "--rounds"),
    (CONFIRM, ["--window", "30"], 2, "Write --window 30s"),
    (BASELINE, ["--rounds", "0"], 2, "--rounds"),
    (BASELINE, ["--ranks", "0"], 2, "--ranks"),
]


@pytest.mark.parametrize(
    ("command", "options", "code", "words"),
    WRONG_TURNS,
    ids=[" ".join([*command, *options]) for command, options, _, _ in WRONG_TURNS],
)
def test_wrong_turns_name_the_next_step(says, profiles, command, options, code, words):
    before = sorted(profiles.rglob("*"))
    assert words in says(*command, *options, code=code)
    if "--slurm" not in options:  # its script stays, to be submitted elsewhere
        assert sorted(profiles.rglob("*")) == before


@pytest.mark.parametrize("command", ["workers", "confirm", "baseline"])
def test_profile_without_probe_submits_nothing(says, profiles, sbatch, command):
    text = (profiles / "p.toml").read_text()
    (profiles / "p.toml").write_text(
        text[: text.index("[evidence.probe]")] + "[evidence]\n"
    )
    assert "autotune probe --model CONFIG.json" in says(
        command, "p.toml", "--slurm", code=6
    )
    assert not sbatch.exists()
