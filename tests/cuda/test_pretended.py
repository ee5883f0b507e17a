"""Whatever is measured on a pretended GPU with its own driver is shown as torch's allocator's, or rejected."""

import html
import json
import re

import pytest

from tests.system.faults.jobs import NO_DROPOUT

pytestmark = pytest.mark.cuda
STEPS = 4
SETTINGS = NO_DROPOUT | {
    "train.precision": "fp32", "train.attention_dropout": 0.0,
    "train.max_steps": STEPS, "train.micro_batch_rows": 2, "train.global_batch_rows": 2,
    "train.log_interval_steps": 1, "train.checkpoint.enabled": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def machine(null_gpus):
    return null_gpus(values=True)


@pytest.fixture(scope="module")
def profile(machine, data):
    path = machine.folder / "profile.toml"
    words = ("--model", "bert-mini", "--seq-length", "64", "--max-rows", "8", "--data", data, "--out", path, "--json")
    ended = machine.autotune("probe", *words)
    assert ended.code == 0, ended
    [told] = json.loads(ended.out)["models"]
    assert (told["bytes_known"], told["curve"]) == ("allocator", [])
    return path


def test_a_report_of_a_probe_calls_sizes_the_allocators_and_shows_no_rate(machine, profile):
    ended = machine.autotune("report", "build", profile, "--out", "report.html")
    assert ended.code == 0, ended
    page = html.unescape((machine.folder / "report.html").read_text())
    assert "memory is that of torch's allocator" in page
    assert "All figures are measured" not in page
    assert "peak, allocator" in page
    table = page[page.index("Every trial of") :]
    assert not re.search(r"<td[^>]*>[\d,.]+</td>\s*<td[^>]*>[\d.]+ m?s</td>", table[: table.index("</table>")])
    compared = machine.autotune("compare", profile, profile, "--json")
    figures = json.loads(compared.out)[0]["figures"]
    assert {(one["metric"]["name"], one["of"]) for one in figures} == {
        ("largest micro-batch", "under the budget"),
        ("peak memory", "largest micro-batch, allocator"),
    }


def test_sizes_are_planned_with_and_rates_are_rejected(machine, data, profile):
    workers = machine.autotune("workers", "--profile", profile, "--data", data, "--minutes", "0.1")
    assert workers.code == 5, workers
    assert "cannot be measured on a pretended NVIDIA H100 NVL" in workers.err, workers
    assert "predicted" in machine.autotune("plan", "--tokens", "1M", "--profile", profile).out
    scaled = machine.autotune("scale", "--profile", profile, "--bandwidth", "100Gbit")
    assert scaled.code == 6, scaled
    assert "no throughput" in scaled.err, scaled


@pytest.fixture(scope="module")
def run(machine, data, profile):
    place = machine.folder / "run"
    sets = [f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    ended = machine.torchrun("-m", "trainer", "--profile", profile, "--data", data, "--out", place, *sets)
    assert ended.code == 0, ended
    return place


def test_a_run_tells_its_driver_and_its_rates_are_rejected(machine, profile, run):
    assert json.loads((run / "run.json").read_text())["driver"] == "0.0 (nullgpu)"
    for words in (("compare", run, run), ("report", "build", profile, "--run", run), ("advise", run)):
        ended = machine.autotune(*words)
        assert ended.code == 5, ended
        assert "cannot be measured on a pretended NVIDIA H100 NVL" in ended.err
        assert "tokens/s" not in ended.out
    [told] = json.loads(machine.autotune("launch", "status", run, "--json").out)["runs"]
    assert (told["step"], told["real_tokens_per_s"]) == (STEPS, None)
