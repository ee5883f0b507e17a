import json
from pathlib import Path

import pytest

from autotune.profiles.store import read_profile
from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.mlm.memory.plan_memory import memory_of_probe
from testbed.examples.profiles import but
from tests.autotune.plan.plans import on_gpus, traced
from tests.autotune.subjects.mlm.network.test_scaling import probed

SHIPPED = Path(__file__).parents[3] / "profiles" / "bert-mini-cpu.toml"


def test_plans_shipped_profile_from_measurements(workdir, says):
    text = says("plan", SHIPPED)
    assert "measured" in text
    assert "CPU-hours" in text
    assert "GPU" not in text.split("tokens/s:")[0]
    assert len(text.splitlines()) <= 45
    assert text.splitlines()[-1].startswith("next: autotune train")


def test_memory_is_that_of_the_profiles_micro_batch(workdir, says):
    printed = json.loads(says("plan", SHIPPED, "--json"))["memory"]
    profile = read_profile(SHIPPED).profile
    probe = profile.evidence.probe
    size = profile.train.micro_batch_size
    assert printed["micro_batch_size"] == size < probe.feasible_max
    (alone,) = printed["shares"]
    # The trace alone predicts more than the budget for the largest micro-batch.
    assert sum(probe.traced_terms_bytes.values()) > probe.feasible_peak_bytes
    assert alone["total_bytes"] < probe.feasible_peak_bytes
    assert alone["fits"]
    text = says("plan", SHIPPED)
    assert f"predicted for micro-batch size {size}" in text


def test_plan_agrees_with_the_measured_peak():
    profile = read_profile(SHIPPED).profile
    probe = profile.evidence.probe
    largest = but(profile, train={"micro_batch_size": probe.feasible_max})
    memory = memory_of_probe(largest)
    assert memory.state.total_bytes == pytest.approx(probe.feasible_peak_bytes, abs=9)


def test_price_becomes_cost_with_bounds(workdir, says):
    (workdir / "p.toml").write_text(profile_to_toml(on_gpus(traced())))
    options = [
        "p.toml",
        "--tokens",
        "1e9",
        "--nodes",
        "2",
        "--price-per-gpu-hour",
        "2.5",
    ]
    printed = json.loads(says("plan", *options, "--json"))
    assert printed["cost"]["value"] == pytest.approx(
        2.5 * printed["device_hours"]["value"]
    )
    assert printed["cost"]["low"] < printed["cost"]["value"] < printed["cost"]["high"]


def test_keeps_predicted_scaling(workdir, says):
    (workdir / "p.toml").write_text(profile_to_toml(probed()))
    out = says(
        "network", "--predict", "p.toml", "--nodes", "1,2,8", "--bandwidth", "25Gbit"
    )
    assert "Max. nodes at 90 % efficiency or more with this global batch" in out
    assert "assumed, 80 % of 25 Gbit/s" in out
    assert "measured" not in out.split("Compute:")[0]
    kept = json.loads(
        (workdir / "reports" / "p" / "scaling-predicted.json").read_text()
    )
    assert [row["nodes"] for row in kept["rows"]] == [1, 2, 8]
