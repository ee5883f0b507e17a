"""The GPU check on pretended GPUs: every stage ends, and no result is kept."""

import json

import pytest

from benchmarks.gpu import TINY, stages_of
from testbed.nullgpu.environment import ROOT
from testbed.programs import TORCHAO

pytestmark = pytest.mark.cuda


QUICK = ("doctor", "arithmetic", "estimate", "probe", "train", "advise")


@pytest.mark.parametrize(
    "only", [QUICK, pytest.param((), marks=pytest.mark.soak, id="all")]
)
def test_every_stage_ends_without_keeping_results(null_gpu, only):
    # With torchao, which starts CUDA when it is imported: trials must not be forked
    # from such a process.
    variables = {"PYTHONPATH": f"{ROOT}:{TORCHAO}"}
    machine = null_gpu(devices=2, driver="580.95.05", variables=variables)
    out = machine.folder / "check"
    page = (ROOT / "docs/reference/gpu.md").read_text()
    kept_reports = sorted((ROOT / "reports").glob("gpu/*/*"))
    command = [
        "-m",
        "benchmarks.gpu",
        "--out",
        out,
        "--tiny",
        "--minutes",
        "40",
        "--keep",
    ]
    if only:
        command += ["--only", ",".join(only)]
    ended = machine.run(*command, timeout_s=2500)
    check = json.loads((out / "check.json").read_text())
    selected = [
        stage.name
        for stage in stages_of(TINY)
        if not only or stage.name.startswith(only)
    ]
    assert sorted(check["stages"]) == sorted(selected), ended
    for stage in check["stages"].values():
        assert stage["status"] == "ended", ended
        assert stage.get("said") is None, ended
    assert ended.code == 2, ended
    for reason in (
        "tiny sizes",
        "NULLGPU_DRIVER",
        "a pretended NVIDIA H100 NVL: its matmuls are wrong",
    ):
        assert reason in ended.err, ended
    assert (ROOT / "docs/reference/gpu.md").read_text() == page
    assert sorted((ROOT / "reports").glob("gpu/*/*")) == kept_reports
    figures = check["figures"]
    [memory] = figures["memory"]
    [training] = figures["training"]
    assert memory["estimated_least"] <= memory["estimated"] <= memory["estimated_most"]
    assert memory["traced"] == memory["largest"] == 4
    assert abs(memory["traced_peak_bytes"] / memory["peak_bytes"] - 1) < 0.05
    assert training["steps"] == TINY.steps
    if not only:
        recipes = {recipe["compared_with"] for recipe in figures["baseline"]}
        assert recipes == {"paper", "hf-trainer"}
        assert any(network["predicted_step_s"] for network in figures["network"])
    assert str(machine.folder) not in (out / "check.json").read_text()
