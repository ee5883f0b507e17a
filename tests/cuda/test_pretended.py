"""Figures of a pretended GPU: memory is the allocator's, rates are rejected."""

import html
import json

import pytest

from tests.system.faults.jobs import NO_DROPOUT

pytestmark = pytest.mark.cuda
SETTINGS = NO_DROPOUT | {
    "train.precision": "fp32",
    "train.attention_dropout": 0.0,
    "train.max_steps": 2,
    "train.micro_batch_size": 2,
    "train.global_batch_size": 2,
    "train.checkpoint.enabled": False,
}


@pytest.fixture(scope="module")
def machine(null_gpus):
    return null_gpus(values=True)


@pytest.fixture(scope="module")
def profile(machine, data):
    path = machine.folder / "profile.toml"
    options = (
        "--model bert-mini --seq-length 64 --max-micro-batch-size 8 --no-compile --json"
    )
    ended = machine.autotune("probe", *options.split(), "--data", data, "--out", path)
    assert ended.code == 0, ended
    [probed] = json.loads(ended.out)["profiles"]
    assert probed["bytes_known"] == "allocator"
    assert probed["evidence"]["probe"]["curve"] == []
    return path


def test_sizes_are_reported_but_rates_rejected(machine, data, profile):
    ended = machine.autotune("report", profile, "--out", "report.html")
    assert ended.code == 0, ended
    assert "memory is that of torch's allocator" in html.unescape(
        (machine.folder / "report.html").read_text()
    )
    workers = machine.autotune(
        "workers", profile, "--data", data, "--time-limit", "0.1min"
    )
    assert workers.code == 5, workers
    assert "cannot be measured on a pretended NVIDIA H100 NVL" in workers.err, workers
    assert "predicted" in machine.autotune("plan", "--tokens", "1M", profile).out
    scaled = machine.autotune("network", "--predict", profile, "--bandwidth", "100Gbit")
    assert scaled.code == 6, scaled
    assert "no throughput" in scaled.err, scaled


def test_rates_of_a_pretended_run_are_rejected(machine, data, profile):
    run = machine.folder / "run"
    settings = [f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    ended = machine.torchrun(
        "-m", "trainer", profile, "--data", data, "--out", run, *settings
    )
    assert ended.code == 0, ended
    assert json.loads((run / "run.json").read_text())["driver"] == "0.0 (nullgpu)"
    advised = machine.autotune("advise", run)
    assert advised.code == 5, advised
    assert "cannot be measured on a pretended NVIDIA H100 NVL" in advised.err, advised
