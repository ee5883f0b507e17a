"""The GPU check on pretended GPUs: every stage ends, and no result is kept."""

import json
import shutil

import pytest

from benchmarks.gpu.queue import select
from benchmarks.gpu.stages import TINY, stages_of
from testbed.nullgpu.environment import ROOT
from testbed.programs import TORCHAO

pytestmark = pytest.mark.cuda

GPU = "h100-nvl"
QUICK = (
    "train-bert-mini",
    "step-mix",
    "trainer-compiled",
    "trainer-paper",
    "residual-bf16-0",
)
"""One stage of each kind but those that only repeat a kind: ``make soak`` has all."""
# With torchao, which starts CUDA when it is imported: trials must not be forked from
# such a process.
VARIABLES = {"PYTHONPATH": f"{ROOT}:{TORCHAO}"}


def run(machine, *only):
    """Run stages; return the check, the end of the command, and the selected names."""
    out = machine.folder / "check"
    kept_reports = sorted((ROOT / "reports").glob("gpu/*/*"))
    page = (ROOT / "docs/reference/gpu.md").read_text()
    words = ["-m", "benchmarks.gpu", "--out", out, "--tiny", "--next", "60min"]
    names = ",".join(only)
    command = [*words, "--keep", *(("--only", names) if only else ())]
    ended = machine.run(*command, timeout_s=3600)
    assert (ROOT / "docs/reference/gpu.md").read_text() == page
    assert sorted((ROOT / "reports").glob("gpu/*/*")) == kept_reports
    text = (out / GPU / "check.json").read_text()
    assert str(machine.folder) not in text
    chosen = [stage.name for stage in select(stages_of(TINY), names)]
    return json.loads(text), ended, chosen


def check_ended(check, ended, chosen):
    for name in chosen:
        assert name in check["stages"], ended
    for stage in check["stages"].values():
        assert stage["status"] == "ended", ended
        assert stage["said"] is None, ended
    assert ended.code == 2, ended
    for reason in (
        "tiny sizes",
        "NULLGPU_DRIVER",
        "a pretended NVIDIA H100 NVL: its matmuls are wrong",
    ):
        assert reason in ended.err, ended


def test_quick_stages_end_over_two_calls(null_gpu):
    machine = null_gpu(driver="580.95.05", variables=VARIABLES)
    check_ended(*run(machine, "probe-bert-mini-capped"))
    profiles = machine.folder / "check" / GPU / "profiles"
    # Stands in for a profile of an earlier call: a tuning compiles layers for minutes.
    capped = profiles / f"bert-mini-{TINY.capped_gpu}.toml"
    shutil.copyfile(capped, profiles / f"bert-mini-{GPU}.toml")
    check, ended, chosen = run(machine, *QUICK)
    check_ended(check, ended, chosen)
    assert len(check["proofs"]) == 2
    assert [row["stage"] for row in check["references"]] == ["train-bert-mini"]
    figures = check["figures"]
    capped_row, memory = figures["capped"][0], figures["memory"][0]
    assert capped_row["largest"] == memory["traced"] == memory["largest"] == 4
    assert abs(memory["traced_peak_bytes"] / memory["peak_bytes"] - 1) < 0.05
    [training] = figures["training"]
    assert training["steps"] == TINY.steps
    trainers = {row["trainer"]: row for row in figures["trainers"]}
    assert set(trainers) == {"compiled", "paper"}
    assert [row["step"].rpartition(" ")[0] for row in figures["step"]] == [
        "mix_order_reduction, 2 sequences,",
        "mix_order_reduction, 2 sequences, with",
    ]
    [residual] = figures["residual"]
    assert residual["steps"] == TINY.residual_steps


@pytest.mark.soak
def test_all_stages_end(null_gpu):
    machine = null_gpu(devices=2, driver="580.95.05", variables=VARIABLES)
    check, ended, _ = run(machine)
    runnable = [
        stage.name
        for stage in stages_of(TINY)
        if stage.unavailable is None and stage.missing_module() is None
    ]
    check_ended(check, ended, runnable)
    figures = check["figures"]
    assert len(figures["shapes"]) == 3
    trainers = {row["trainer"] for row in figures["trainers"]}
    assert trainers == {"compiled", "bf16", "grouped", "defaults", "paper"}
    imitations = {row["compared_with"] for row in figures["imitations"]}
    assert imitations == {"bert-mini, paper", "bert-mini, hf-trainer"}
    assert any(row["predicted_step_s"] for row in figures["network"])
