import json
from dataclasses import replace
from pathlib import Path

from autotune.cluster.slurm import read_slurm
from autotune.doctor.command import NEXT_COMMAND, examine, render
from testbed.fakes import GPU_FACTS, FakeClock, FakeGpu, FakeGpuMonitor, FakeHost

SECTIONS = ("Host", "GPUs", "Disks", "Network", "SLURM", "Problems for measurements")


def test_text_has_every_section(says, tmp_path):
    lines = says("doctor").splitlines()
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
    assert lines[-1] == f"next: {NEXT_COMMAND}"


def test_json_has_every_section(says, tmp_path):
    content = json.loads(
        says("doctor", "--json", "--path", tmp_path, "--path", "/proc")
    )
    derived = {"allotted_cpus", "in_job", "is_login_node", "seconds_left"}
    envelope = {"schema_version", "tool_version"}
    assert set(content) == {"machine", "findings", "next", "rates"} | derived | envelope
    assert content["allotted_cpus"] >= 1
    assert [disk["path"] for disk in content["machine"]["host"]["disks"]] == [
        str(tmp_path),
        "/proc",
    ]
    assert all(
        set(finding) == {"severity", "claim", "next_step"}
        for finding in content["findings"]
    )


def test_reads_everything_through_ports():
    gpu_model = replace(GPU_FACTS, mig_enabled=True)
    clock = FakeClock()
    monitor = FakeGpuMonitor([FakeGpu(facts=gpu_model)], clock=clock)
    machine = examine(
        FakeHost(versions={"torch": "2"}),
        monitor,
        read_slurm({}, lambda _: None),
        clock,
        [Path("/d")],
    )
    assert machine.time_utc == clock.utc_now()
    assert [status.facts for status in machine.gpus] == [gpu_model]
    assert "MIG is on for GPU 0" in render(machine, as_json=False)
    assert json.loads(render(machine, as_json=True))["machine"]["versions"] == {
        "torch": "2"
    }


def test_writes_measured_rates(says, monkeypatch, tmp_path):
    from autotune.speed import measure
    from autotune.speed.decide import data_sheet_rates

    rates = data_sheet_rates("NVIDIA H100 PCIe").model_copy(
        update={"source": "measured on this machine"}
    )
    monkeypatch.setattr(measure, "measure_rates", lambda *_, **__: rates)
    monkeypatch.chdir(tmp_path)
    assert "reports/machines/nvidia-h100-pcie.json" in says("doctor", "--measure")
    assert measure.known_rates("NVIDIA H100 PCIe") == rates
    assert (
        json.loads(says("doctor", "--measure", "--json"))["rates"]["source"]
        == rates.source
    )
