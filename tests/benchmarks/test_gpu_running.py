"""Stages of the GPU check run within their time, and continue what is there."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from autotune.errors import AutotuneError, MachineLacks, UsageError
from autotune.machine.torch_gpus import gpus_of_torch
from benchmarks.bars import EXIT_UNMEASURED
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.dataset import link_data, make_data
from benchmarks.gpu.queue import GpuMachine, Queue
from benchmarks.gpu.results import CUT_OFF, ENDED, FAILED, ROOT, known_results
from benchmarks.gpu.running import Call, open_check
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.stages import TINY
from trainer.formats.manifest import read_manifest

NVL, DRIVER = "NVIDIA H100 NVL", "580.82.07"
MACHINE = GpuMachine(name="h100-nvl", gpus=1, memory_bytes=94 * 10**9)
HANGS = (
    "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import"
    " time; time.sleep(600)']); "
)
SLEEPS = "print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"
COUNTS = (
    "from pathlib import Path; p = Path('n'); p.write_text(p.read_text() + 'x' if"
    " p.exists() else 'x')"
)


def stage(name, code, **changes):
    return Stage(
        name=name,
        words=("-c", code),
        code=("benchmarks/bars.py",),
        **{"least_s": 0.0, "most_s": 60.0} | changes,
    )


@pytest.fixture
def site():
    facts = SimpleNamespace(name=NVL, driver=DRIVER)
    versions = {"torch": "2.14.1+cu130", "transformers": "5.17"}
    return SimpleNamespace(gpu=facts, gpus=(facts,), versions=versions, name="h100-nvl")


@pytest.fixture
def run(tmp_path, site):
    """Run stages in one call; it takes the time of the call and kept checks."""

    def call(*stages, seconds=60.0, kept=tmp_path / "none"):
        folder = tmp_path / "h100-nvl"
        folder.mkdir(exist_ok=True)
        check = open_check(folder, site, tiny=False)
        known = known_results(tmp_path, "h100-nvl", kept)
        queue = Queue(stages=stages, chosen=stages, known=known, libraries={})
        left_out = Call(
            check=check,
            folder=folder,
            end_s=time.monotonic() + seconds,
            libraries={},
            began_utc="now",
        ).run(queue, MACHINE)
        if check["stages"]:
            assert json.loads((folder / "check.json").read_text()) == check
        statuses = {name: stage["status"] for name, stage in check["stages"].items()}
        reasons = {one.stage.name: one.reason for one in left_out}
        return statuses, check["stages"], reasons

    return call


def test_failed_stage_costs_no_other(tmp_path, run):
    fails = stage("fails", "import sys; sys.exit('error: no such thing')")
    needs = stage("needs", "print('{}')", reads="profiles/a.toml")
    good = (
        f"import json; print(json.dumps([{str(tmp_path / 'h100-nvl/data')!r},"
        f" {str(ROOT / 'x')!r}]))"
    )
    statuses, stages, reasons = run(fails, needs, stage("good", good))
    assert statuses == {"fails": FAILED, "good": ENDED}
    assert reasons == {"needs": "needs profiles/a.toml"}
    assert stages["fails"]["said"] == "exit code 1\nerror: no such thing"
    assert stages["good"]["answer"] == ["./data", "./x"]


def test_later_call_continues(tmp_path, run):
    once = stage("once", COUNTS)
    again = stage("again", f"{COUNTS}; raise SystemExit(1)")
    run(once, again)
    _, _, reasons = run(once, again, stage("long", "", least_s=90.0))
    assert (tmp_path / "h100-nvl/n").read_text() == "xxx"
    assert reasons == {"long": "no time: takes at least 1 min 30 s"}


def test_stage_gets_a_share_of_the_time(run):
    words = ("-c", "print([])", "{minutes}", "{seconds}", "{gpu}")
    timed = Stage(
        name="timed", words=words, least_s=0, most_s=30, code=("benchmarks/bars.py",)
    )
    _, stages, _ = run(timed)
    assert stages["timed"]["command"][3:] == ["0.40", "24", "h100-nvl"]


def test_from_scratch_removes_what_is_there(tmp_path, run):
    (tmp_path / "h100-nvl/runs/a").mkdir(parents=True)
    code = "from pathlib import Path; print(int(Path('runs/a').exists()))"
    _, stages, _ = run(
        stage("keeps", code), stage("removes", code, from_scratch="runs/a")
    )
    assert (stages["keeps"]["answer"], stages["removes"]["answer"]) == (1, 0)


def test_kept_profile_is_brought_along(tmp_path, run):
    kept = tmp_path / "kept/h100-nvl/2026-01-01"
    (kept / "profiles").mkdir(parents=True)
    (kept / "profiles/a-h100-nvl.toml").write_text("x")
    writer = stage("tune", "", writes="profiles/a-{gpu}.toml")
    known = {"tune": {"status": ENDED, "began_utc": "2026-01-01"}}
    (kept / "check.json").write_text(json.dumps({"stages": known}))
    reads = "from pathlib import Path; print(len(Path('profiles/a-h100-nvl.toml')"
    reader = stage("train", f"{reads}.read_text()))", reads="profiles/a-{gpu}.toml")
    slow_writer = stage("tune", "", writes=writer.writes, least_s=99.0)
    statuses, stages, _ = run(slow_writer, reader, kept=tmp_path / "kept")
    assert statuses == {"train": ENDED}
    assert stages["train"]["answer"] == 1


def test_hanging_stage_is_ended(tmp_path, run):
    began_s = time.monotonic()
    statuses, _, _ = run(stage("hangs", HANGS + SLEEPS, most_s=4.0))
    assert statuses == {"hangs": CUT_OFF}
    assert time.monotonic() - began_s < 30
    group = int((tmp_path / "h100-nvl/logs/hangs.log").read_text())
    alive = [
        process.pid
        for process in psutil.process_iter(["status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    ]
    assert not [
        pid for pid in alive if psutil.pid_exists(pid) and os.getpgid(pid) == group
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_keeps_finished_stages(tmp_path, number):
    script = f"""
import signal, sys
from types import SimpleNamespace
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.stage import Stage
signal.signal(signal.SIGINT, signal.default_int_handler)
gpu = SimpleNamespace(name={NVL!r}, driver={DRIVER!r}, total_bytes=94 * 10**9)
command.require_gpu_of_torch = lambda: None
command.open_device = lambda *_: SimpleNamespace(
    gpu=gpu, gpus=(gpu,), versions={{}}, name="h100-nvl"
)
command.make_data = lambda *_: None
command.libraries_of = lambda *_: {{}}
names = (("done", "print(1)"), ("hangs", {HANGS + SLEEPS!r}))
command.stages_of = lambda _: [
    Stage(name=name, words=("-c", code), least_s=0, most_s=60, code=())
    for name, code in names
]
sys.exit(command.main(["--out", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "h100-nvl/logs/hangs.log"
    while not (log.exists() and log.read_text().strip()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert not psutil.pid_exists(int(log.read_text()))
    check = json.loads((tmp_path / "h100-nvl/check.json").read_text())
    assert check["stages"]["done"]["status"] == ENDED


def test_check_of_other_gpus_is_not_continued(tmp_path, site):
    check = open_check(tmp_path, site, tiny=False)
    check["stages"] = {"doctor": {"status": ENDED}}
    (tmp_path / "check.json").write_text(json.dumps(check))
    site.gpu.driver = "581.0"
    later = open_check(tmp_path, site, tiny=False)
    assert later["stages"] == {"doctor": {"status": ENDED}}
    assert later["made_with"]["driver"] == "581.0"
    with pytest.raises(AutotuneError, match="another tiny"):
        open_check(tmp_path, site, tiny=True)
    site.gpu.name = "NVIDIA H200"
    with pytest.raises(AutotuneError, match="another gpu"):
        open_check(tmp_path, site, tiny=False)


def test_another_dataset_is_rejected(tmp_path):
    make_data(tmp_path, None, TINY)
    with pytest.raises(AutotuneError, match="is another dataset"):
        make_data(tmp_path, tmp_path / "mine", TINY)


def test_every_machine_makes_the_same_dataset(tmp_path):
    hashes = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        make_data(tmp_path / name, None, TINY)
        hashes.add(read_manifest(tmp_path / name / "data").dataset_hash)
    assert len(hashes) == 1


def test_dataset_is_linked_into_a_check(tmp_path):
    make_data(tmp_path, None, TINY)
    folder = tmp_path / "h100-nvl"
    folder.mkdir()
    (folder / "data").symlink_to(tmp_path / "gone")
    link_data(tmp_path, folder)
    link_data(tmp_path, folder)
    assert (folder / "data/manifest.json").is_file()


def test_requires_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["--out", str(tmp_path)]) == EXIT_UNMEASURED
    assert "no GPU found" in capsys.readouterr().err


def test_requires_a_stage_that_can_run():
    with pytest.raises(UsageError, match="network cannot run here: needs 2 GPUs"):
        command.require_runnable([stage("network", "", gpus=2)], MACHINE)


@pytest.mark.skipif(bool(gpus_of_torch()), reason="torch sees a GPU")
def test_cpu_build_of_torch_is_named():
    with pytest.raises(MachineLacks, match=r"^torch .+ of .+ sees no GPU$") as caught:
        command.require_gpu_of_torch()
    assert "Activate the environment" in caught.value.next_step
