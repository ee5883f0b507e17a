import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import MachineLacks
from autotune.machine.values import GpuProcess
from autotune.report.stage import build_report
from autotune.trials.session import Session, require_idle_gpus
from autotune.trials.trial_log import TrialLog
from autotune.trials.values import TimedOut
from autotune.workers.measure import training_windows
from autotune.workers.values import SweepRequest
from testbed.examples.profiles import FINGERPRINT, but, example_profile
from testbed.examples.trials import record
from testbed.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from tests.autotune.machine.test_measured_device import H200
from trainer.data.dataset import read_manifest

EXAMPLE = example_profile()


def bench_of(manifest=None, host=None) -> Session:
    site = SimpleNamespace(host=host or FakeHost().facts([Path()]))
    return Session(
        site=site,
        manifest=manifest,
        server=SimpleNamespace(),
        machine=SimpleNamespace(),
    )


def runner(tmp_path, here=FINGERPRINT, update=lambda *_: None, expected_trials=1):
    return bench_of().runner(tmp_path, here, update, expected_trials)


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "LD_PRELOAD",
        "",
    ],
)
def test_results_are_taken_up_again_only_with_the_same_settings_by_the_same_version(
    tmp_path, monkeypatch, name
):
    monkeypatch.delenv(name or "X", raising=False)
    before = runner(tmp_path).site
    assert runner(tmp_path).site == before
    if name:
        monkeypatch.setenv(name, "1")
    else:
        monkeypatch.setattr("autotune.trials.session.__version__", "9.9")
    assert runner(tmp_path).site != before


def busy(uuid: str, index: int, *processes: GpuProcess) -> FakeGpu:
    return FakeGpu(
        facts=replace(H200, uuid=uuid, index=index),
        used_bytes=[0],
        processes=[processes],
    )


def test_another_gpu_is_named_only_if_one_is_free():
    somebody = GpuProcess(pid=42, used_bytes=2**30)
    with pytest.raises(MachineLacks, match="42") as refused:
        require_idle_gpus(FakeGpuMonitor([busy("a", 0, somebody)]), ["a"])
    assert refused.value.next_step == "Wait until the GPU is free."
    two = [busy("a", 0, somebody), busy("b", 1, somebody), busy("c", 2)]
    with pytest.raises(MachineLacks) as refused:
        require_idle_gpus(FakeGpuMonitor(two), ["a"])
    assert refused.value.next_step.endswith("CUDA_VISIBLE_DEVICES=2.")
    require_idle_gpus(FakeGpuMonitor(two), ["c"])


def test_more_trials_than_were_expected_are_not_shown_as_all_of_them_and_trials_say_where_they_are_measured(
    tmp_path,
):
    told = []
    showing = runner(
        tmp_path, update=lambda *args: told.append(args[:2]), expected_trials=2
    )
    for _ in range(3):
        showing.on_trial("one", None)
        showing.on_trial("one", TimedOut(detail="late"))
    assert told == [(0, 2), (1, 2), (1, 2), (2, 2), (2, None), (3, None)]
    found = showing.made_on
    assert (found.machine, found.processors, found.torch) == (
        "A CPU",
        "2 of A CPU",
        "2.13.0",
    )
    of_gpu = FINGERPRINT.model_copy(update={"gpu_name": "NVIDIA H100", "gpu_count": 2})
    assert runner(tmp_path, of_gpu).made_on.machine == "2 x NVIDIA H100"


def test_a_ledger_that_another_profile_of_the_name_writes_is_said_and_not_used(
    tmp_path, capsys
):
    before = runner(tmp_path)
    trial = record(site=before.site, config={"seq_length_tokens": 8})
    TrialLog(tmp_path / "trials", "w").append(trial.model_dump(mode="json"))
    assert runner(tmp_path).knows(trial.finished().trial) is False  # of another key
    assert "warn" not in capsys.readouterr().err
    TrialLog(tmp_path / "trials", "v").append(
        record(site="there", dataset_hash="e").model_dump(mode="json")
    )
    runner(tmp_path)
    assert "warning: 1 trials in" in capsys.readouterr().err


def limits(data, host=None, asked=None, **train):
    request = SweepRequest(
        data=Path(), reports=Path("r"), minutes=1.0, max_workers=asked
    )
    return training_windows(
        bench_of(read_manifest(data), host), but(EXAMPLE, train=train).train, request, 2
    ).limits


def test_loader_workers_are_limited_by_the_sites_cpus_ranks_memory_and_the_size_of_a_batch(
    patterned_dataset,
):
    small, large = (
        limits(patterned_dataset, micro_batch_size=rows) for rows in (2, 64)
    )
    assert small.cpus_per_rank == 4
    assert limits(patterned_dataset, asked=3).max_workers()[0] == 3
    assert large.batch_bytes == pytest.approx(32 * small.batch_bytes, rel=0.01)
    packed, padded = (
        limits(patterned_dataset, layout=layout).batch_bytes
        for layout in ("packed", "padded")
    )
    assert packed > padded  # the places of more samples
    tight = replace(FakeHost().facts([Path()]), shm_free_bytes=2**10)
    assert limits(patterned_dataset, host=tight).max_workers()[0] == 0


def test_profiles_of_several_models_are_one_report_which_is_written_over_an_older_one(
    here,
):
    profile, out = here / "p.toml", here / "r" / "both"
    other = here / "other.toml"
    other.write_text(profile.read_text())
    build_report([profile], here / "r", out)
    profile.write_text(profile.read_text().replace('name = "tiny"', 'name = "teeny"'))
    places = build_report([profile, other], here / "r", out)
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "both.html",
        "both.json",
        "both.md",
    ]
    assert len(json.loads(places["json"].read_text())["profiles"]) == 2
    assert "teeny" in places["markdown"].read_text()
