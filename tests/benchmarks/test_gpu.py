import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from autotune.errors import AutotuneError, MachineLacks, UsageError
from autotune.machine.nvml import gpus_of_torch
from autotune.profiles.toml_file import profile_to_toml
from benchmarks import gpu
from benchmarks.bars import EXIT_UNMEASURED
from benchmarks.gpu import CUT_OFF, ENDED, FAILED, NO_TIME, Stage
from testbed.examples.checkpoints import header_of
from testbed.examples.profiles import but
from testbed.examples.run_rows import row_of
from testbed.examples.tuning import example_profile

NVL = "NVIDIA H100 NVL"
DRIVER = "580.82.07"
HANGS = (
    "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import"
    " time; time.sleep(600)']); "
)
SLEEPS = "print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"


def stage(name, code, **changes):
    return Stage(
        name=name, words=("-c", code), **{"least_s": 0.0, "most_s": 60.0} | changes
    )


def run(out, *stages, check=None, seconds=60.0):
    check = check or {"stages": {}}
    gpu.run_stages(check, stages, out, time.monotonic() + seconds)
    assert json.loads((out / "check.json").read_text()) == check
    return {name: stage["status"] for name, stage in check["stages"].items()}, check[
        "stages"
    ]


def test_failed_phase_costs_no_other(tmp_path):
    fails = stage("fails", "import sys; sys.exit('error: no such thing')")
    needs = stage("needs", "print('{}')", needs="profiles/a.toml")
    good = (
        f"import json; print(json.dumps([{str(tmp_path / 'data')!r},"
        f" {str(gpu.ROOT / 'x')!r}]))"
    )
    statuses, stages = run(tmp_path, fails, needs, stage("good", good))
    assert statuses == {"fails": FAILED, "needs": FAILED, "good": ENDED}
    assert stages["fails"]["said"] == "exit code 1\nerror: no such thing"
    assert "profiles/a.toml is missing" in stages["needs"]["said"]
    assert stages["good"]["answer"] == ["./data", "./x"]


def test_finished_phase_is_not_repeated(tmp_path):
    counts = (
        "from pathlib import Path; p = Path('n'); p.write_text(p.read_text() + 'x' if"
        " p.exists() else 'x')"
    )
    once = stage("once", counts)
    again = stage("again", f"{counts}; raise SystemExit(1)")
    check = {"stages": run(tmp_path, once, again)[1]}
    run(tmp_path, once, again, check=check)
    assert (tmp_path / "n").read_text() == "xxx"
    timed = Stage(
        name="timed", words=("-c", "print([])", "{minutes}"), least_s=0, most_s=30
    )
    rest = (
        once,
        stage("again", "", least_s=90.0),
        stage("long", "", least_s=90.0),
        timed,
    )
    statuses, stages = run(tmp_path, *rest, check=check)
    assert statuses == {"once": ENDED, "again": FAILED, "long": NO_TIME, "timed": ENDED}
    assert stages["timed"]["command"][-1] == "0.40"


def test_hanging_phase_is_ended(tmp_path):
    began_s = time.monotonic()
    statuses, _ = run(tmp_path, stage("hangs", HANGS + SLEEPS, most_s=4.0))
    assert statuses == {"hangs": CUT_OFF}
    assert time.monotonic() - began_s < 8
    group = int((tmp_path / "logs/hangs.log").read_text())
    alive = [
        process.pid
        for process in psutil.process_iter(["status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
    ]
    assert not [
        pid for pid in alive if psutil.pid_exists(pid) and os.getpgid(pid) == group
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_keeps_finished_phases(tmp_path, monkeypatch, number):
    script = f"""
import signal, sys
from pathlib import Path
from types import SimpleNamespace
from benchmarks import gpu
signal.signal(signal.SIGINT, signal.default_int_handler)
gpu.require_gpu_of_torch = lambda: None
gpu.open_device = lambda *_: SimpleNamespace(gpus=(1,))
gpu.make_data = lambda *_: None
gpu.open_check = lambda *_, tiny: {{"stages": {{}}}}
names = (("done", "print(1)"), ("hangs", {HANGS + SLEEPS!r}))
gpu.stages_of = lambda _: [
    gpu.Stage(name=name, words=("-c", code), least_s=0, most_s=60)
    for name, code in names
]
sys.exit(gpu.main(["--out", {str(tmp_path)!r}]))
"""
    root = str(gpu.ROOT)
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=root, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "logs" / "hangs.log"
    while not (log.exists() and log.read_text().strip()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert not psutil.pid_exists(int(log.read_text()))
    assert (
        json.loads((tmp_path / "check.json").read_text())["stages"]["done"]["status"]
        == ENDED
    )


@pytest.fixture
def site(tmp_path):
    gpu.make_data(tmp_path, None, gpu.TINY)
    facts = SimpleNamespace(name=NVL, driver=DRIVER)
    return SimpleNamespace(
        gpu=facts, gpus=(facts,), versions={"torch": "2.14.1+cu130"}, name="h100-nvl"
    )


def test_another_check_is_not_continued(tmp_path, site):
    check = gpu.open_check(tmp_path, site, tiny=False)
    (tmp_path / "check.json").write_text(
        json.dumps(check | {"stages": {"doctor": {"status": ENDED}}})
    )
    assert gpu.open_check(tmp_path, site, tiny=False)["stages"] == {
        "doctor": {"status": ENDED}
    }
    with pytest.raises(AutotuneError, match="another tiny"):
        gpu.open_check(tmp_path, site, tiny=True)
    site.gpu.driver = "581.0"
    site.versions["torch"] = "2.15.0"
    with pytest.raises(AutotuneError, match="another driver, torch"):
        gpu.open_check(tmp_path, site, tiny=False)
    with pytest.raises(AutotuneError, match="is another dataset"):
        gpu.make_data(tmp_path, tmp_path / "mine", gpu.TINY)


@pytest.fixture
def real(tmp_path, site):
    (tmp_path / "profiles").mkdir()
    profile = example_profile("d")
    (tmp_path / "profiles/bert-120m.toml").write_text(profile_to_toml(profile))
    directory = tmp_path / "runs/bert-120m"
    directory.mkdir(parents=True)
    header = header_of(profile.train, device=NVL, driver=DRIVER, parameters=10**8)
    (directory / "run.json").write_text(header.model_dump_json())
    rows = (
        row_of(number, tokens_per_s=400_000.0 * header.world_size, mfu=0.3)
        for number in range(1, 5)
    )
    (directory / "steps.jsonl").write_text(
        "".join(row.model_dump_json() + "\n" for row in rows)
    )
    check = gpu.open_check(tmp_path, site, tiny=False)
    answers = {
        "arithmetic": {"right": True, "flops_per_s": 600e12},
        "train-bert-120m": None,
    }
    check["stages"] = {
        name: {"status": ENDED, "answer": answer, "seconds": 1.0}
        for name, answer in answers.items()
    }
    check["figures"] = gpu.figures_of(tmp_path, check["stages"])
    return tmp_path, check


def test_real_check_is_kept_by_gpu(real):
    out, check = real
    assert gpu.reasons_against(out, check) == []
    check["started_utc"] = "2026-01-01T00:00:00+00:00"
    directory = gpu.keep(out, check, out / "kept")
    assert directory == out / "kept/h100-nvl/2026-01-01"
    (directory / "profiles/old.toml").touch()
    gpu.keep(out, check, out / "kept")
    kept = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    assert kept == {"check.json", "profiles", "profiles/bert-120m.toml"}
    gpu.keep(out, check | {"started_utc": "2026-02-01T00:00:00+00:00"}, out / "kept")
    page = gpu.page(f"# Words\n\n{gpu.MARK}\n\nold figures\n", out / "kept")
    assert page.startswith(f"# Words\n\n{gpu.MARK}\n\n### 1 x {NVL}, 2026-02-01\n")
    assert "old figures" not in page
    assert page.index("2026-01-01") > page.index("2026-02-01")
    assert "Large bf16 matmuls reach 600 TFLOP/s." in page
    assert "| MFU of bert-120m | 30.0 % | ≥ 45.0 % | **below target** |" in page
    probe = example_profile("d").evidence.probe
    head, _, row = page[page.index("| configuration |") :].splitlines()[:3]
    cells = dict(zip(*(re.split(r" *\| *", line) for line in (head, row)), strict=True))
    assert (cells["traced"], cells["largest"]) == (
        str(probe.traced_micro_batch_size),
        str(probe.feasible_max),
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tiny": True}, "tiny sizes"),
        ({"tiny": None}, "tiny sizes"),
        ({"driver": "0.0 (nullgpu)"}, "a pretended NVIDIA H100 NVL"),
        ({"driver": None}, "its driver is not known"),
        ({"driver": "581.0"}, "is of NVIDIA H100 NVL, driver 580.82.07"),
        ({"gpu": "NVIDIA Unheard Of"}, "no peak is known of NVIDIA Unheard Of"),
        ({"gpu": None}, "no peak is known of None"),
        ({"gpu": "NVIDIA H200"}, "profiles/bert-120m.toml is of NVIDIA H100 NVL"),
        ({"answer": None}, "matmuls are wrong, or were not checked"),
        ({"answer": {"right": False, "flops_per_s": 6e14}}, "matmuls are wrong"),
        ({"answer": {"right": True}}, "0 FLOP/s are not plausible for NVIDIA H100 NVL"),
        (
            {"answer": {"right": True, "flops_per_s": 8.6e15}},
            "8.6e+15 FLOP/s are not plausible for NVIDIA H100 NVL",
        ),
        (
            {"answer": {"right": True, "flops_per_s": 1e11}},
            "1e+11 FLOP/s are not plausible for NVIDIA H100 NVL",
        ),
    ],
    ids=[
        "tiny",
        "unknown size",
        "simulated GPU",
        "unknown driver",
        "another driver",
        "unknown GPU",
        "no GPU",
        "another GPU",
        "matmuls unchecked",
        "matmuls wrong",
        "no rate",
        "rate too high",
        "rate too low",
    ],
)
def test_implausible_gpu_is_not_kept(real, change, reason):
    out, check = real
    (
        check["stages"]["arithmetic"] if "answer" in change else check["made_with"]
    ).update(change)
    assert reason in " ".join(gpu.reasons_against(out, check))


def test_remembers_a_simulated_gpu(real, site, monkeypatch):
    out, check = real
    (out / "check.json").write_text(json.dumps(check))
    monkeypatch.setenv("NULLGPU_DRIVER", DRIVER)
    check = gpu.open_check(out, site, tiny=False)
    (out / "check.json").write_text(json.dumps(check))
    monkeypatch.delenv("NULLGPU_DRIVER")
    assert "NULLGPU_DRIVER is set" in " ".join(
        gpu.reasons_against(out, gpu.open_check(out, site, tiny=False))
    )


def test_implausible_rate_is_not_kept(real):
    out, check = real
    profile = example_profile("d")
    probe = profile.evidence.probe
    curve = [
        point.model_copy(update={"padded_tokens_per_s": 5e7}) for point in probe.curve
    ]
    too_fast = but(
        profile, evidence={"probe": probe.model_copy(update={"curve": curve})}
    )
    path = out / "profiles/bert-120m.toml"
    good = path.read_text()
    for text, reason in (
        (profile_to_toml(too_fast), "exceeds its peak of 835"),
        (
            good.replace("micro_batch_size = 64", "micro_batch_size = 65"),
            "it was edited",
        ),
    ):
        path.write_text(text)
        assert reason in " ".join(gpu.reasons_against(out, check))
    path.write_text(good)
    steps = out / "runs/bert-120m/steps.jsonl"
    steps.write_text(row_of(1, tokens_per_s=1e9).model_dump_json() + "\n")
    assert "runs/bert-120m/run.json: " in " ".join(gpu.reasons_against(out, check))
    path.unlink()
    steps.parent.joinpath("run.json").unlink()
    assert gpu.reasons_against(out, check) == ["no profile was measured"]


STAGES = tuple(gpu.stages_of(gpu.FULL))


@pytest.mark.parametrize(
    ("only", "gpus", "names"),
    [
        ("probe-bert-120m,tune", 1, ["probe-bert-120m", "tune"]),
        ("doc,train-bert-350m", 1, ["doctor", "train-bert-350m"]),
        ("network,scale", 2, ["network-bert-120m", "scale-bert-120m"]),
        ("", 2, [stage.name for stage in STAGES]),
        ("doctor,maths", 1, "stage 'maths' not found"),
        ("network,scale", 1, "network,scale requires 2 GPUs"),
    ],
)
def test_phases_can_be_selected(only, gpus, names):
    if isinstance(names, list):
        assert [stage.name for stage in gpu.select(STAGES, only, gpus)] == names
    else:
        with pytest.raises(UsageError, match=names):
            gpu.select(STAGES, only, gpus)


def test_requires_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--out", str(tmp_path)]) == EXIT_UNMEASURED
    assert "no GPU found" in capsys.readouterr().err


def test_unmeasured_claim_names_its_phases():
    stages = [stage.name for stage in STAGES]
    assert len(stages) == len(set(stages))
    for bar, _, measured_by in gpu.claims_of({}):
        assert bar.holds is None
        assert all(
            any(stage.startswith(word) for stage in stages)
            for word in measured_by.split(",")
        )
        assert f"`--only {measured_by}`" in gpu.results([])


def test_page_holds_the_kept_checks():
    written = gpu.PAGE.read_text()
    assert written == gpu.page(written, gpu.KEPT)


def test_check_imports_no_torch():
    code = (
        "import sys, benchmarks.gpu; sys.exit(bool({'torch', 'transformers', 'optuna'}"
        " & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=gpu.ROOT, check=False
        ).returncode
        == 0
    )


@pytest.mark.skipif(bool(gpus_of_torch()), reason="torch sees a GPU")
def test_cpu_build_of_torch_is_named():
    with pytest.raises(MachineLacks, match=r"^torch .+ of .+ sees no GPU$") as caught:
        gpu.require_gpu_of_torch()
    assert "Activate the environment" in caught.value.next_step
