"""The GPU check on pretended GPUs: every stage's command runs to its end, and nothing
is kept."""

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
    # With torchao, which starts CUDA where it is imported: trials must not be forked
    # from such a process.
    paths = {"PYTHONPATH": f"{ROOT}:{TORCHAO}"}
    machine = null_gpu(devices=2, driver="580.95.05", variables=paths)
    out, page = machine.folder / "check", (ROOT / "docs/reference/gpu.md").read_text()
    kept = sorted((ROOT / "reports").glob("gpu/*/*"))
    command = (
        "-m",
        "benchmarks.gpu",
        "--out",
        out,
        "--tiny",
        "--minutes",
        "40",
        "--keep",
    )
    command = (*command, "--only", ",".join(only)) if only else command
    ended = machine.run(*command, timeout_s=2500)
    check = json.loads((out / "check.json").read_text())
    assert {
        name: (one["status"], one.get("said")) for name, one in check["stages"].items()
    } == {
        stage.name: ("ended", None)
        for stage in stages_of(TINY)
        if stage.name.startswith(only or ("",))
    }, ended
    assert ended.code == 2, ended
    for reason in (
        "tiny sizes",
        "NULLGPU_DRIVER",
        "a pretended NVIDIA H100 NVL: its matmuls are wrong",
    ):
        assert reason in ended.err, ended
    assert (ROOT / "docs/reference/gpu.md").read_text() == page
    assert sorted((ROOT / "reports").glob("gpu/*/*")) == kept
    found = check["figures"]
    [memory], [training] = found["memory"], found["training"]
    assert memory["estimated_least"] <= memory["estimated"] <= memory["estimated_most"]
    assert memory["traced"] == memory["largest"] == 4
    assert abs(memory["traced_peak_bytes"] / memory["peak_bytes"] - 1) < 0.05
    assert training["steps"] == TINY.steps
    assert only or {one["compared_with"] for one in found["baseline"]} == {
        "paper",
        "hf-trainer",
    }
    assert only or any(one["predicted_step_s"] for one in found["network"])
    assert str(machine.folder) not in (out / "check.json").read_text()
