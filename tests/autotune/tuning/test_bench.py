from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.hardware import GpuProcess
from autotune.core.outcome import TimedOut
from autotune.errors import MachineLacks
from autotune.search.workers import SweepRequest
from autotune.store import Ledger
from autotune.tuning.bench import Bench, refuse_company
from tests.autotune.profiles import FINGERPRINT, example_profile
from tests.autotune.search.test_site import H200
from tests.autotune.trials import record
from tests.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from trainer.dataset import read_manifest


def runner(tmp_path, here=FINGERPRINT):
    bench = Bench(
        site=SimpleNamespace(), server=SimpleNamespace(), machine=SimpleNamespace(), monitor=SimpleNamespace()
    )
    return bench.runner(tmp_path, here, lambda *_: None, expected_trials=1)


def test_results_are_taken_up_again_on_the_same_machine_only_with_the_same_settings(tmp_path, monkeypatch):
    before = runner(tmp_path).site
    assert runner(tmp_path).site == before
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert runner(tmp_path).site != before


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "LD_PRELOAD"])
def test_every_variable_that_trials_inherit_counts(tmp_path, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    before = runner(tmp_path).site
    monkeypatch.setenv(name, "1")
    assert runner(tmp_path).site != before


def busy(uuid: str, index: int, *processes: GpuProcess) -> FakeGpu:
    return FakeGpu(facts=replace(H200, uuid=uuid, index=index), used_bytes=[0], processes=[processes])


def test_another_gpu_is_named_only_if_one_is_free():
    somebody = GpuProcess(pid=42, used_bytes=2**30)
    with pytest.raises(MachineLacks, match="42") as refused:
        refuse_company(FakeGpuMonitor([busy("a", 0, somebody)]), ["a"])
    assert refused.value.next_step == "Wait for it to end."
    two = [busy("a", 0, somebody), busy("b", 1, somebody), busy("c", 2)]
    with pytest.raises(MachineLacks) as refused:
        refuse_company(FakeGpuMonitor(two), ["a"])
    assert refused.value.next_step.endswith("CUDA_VISIBLE_DEVICES=2.")
    refuse_company(FakeGpuMonitor(two), ["c"])


def test_more_trials_than_were_expected_are_not_shown_as_all_of_them(tmp_path):
    told = []
    bench = Bench(
        site=SimpleNamespace(), server=SimpleNamespace(), machine=SimpleNamespace(), monitor=SimpleNamespace()
    )
    runner = bench.runner(tmp_path, FINGERPRINT, lambda *args: told.append(args[:2]), expected_trials=2)
    for _ in range(3):
        runner.on_trial("one", None)
        runner.on_trial("one", TimedOut(detail="late"))
    assert told == [(0, 2), (1, 2), (1, 2), (2, 2), (2, None), (3, None)]


def test_another_version_of_the_tool_measures_anew(tmp_path, monkeypatch):
    before = runner(tmp_path).site
    monkeypatch.setattr("autotune.tuning.bench.__version__", "9.9")
    assert runner(tmp_path).site != before


def test_trials_say_where_they_are_measured(tmp_path):
    found = runner(tmp_path).made_on
    assert (found.machine, found.processors, found.torch) == ("A CPU", "2 of A CPU", "2.13.0")
    of_gpu = FINGERPRINT.model_copy(update={"gpu_name": "NVIDIA H100", "gpu_count": 2})
    assert runner(tmp_path, of_gpu).made_on.machine == "2 x NVIDIA H100"


def test_a_ledger_that_another_profile_of_the_name_writes_is_said_and_not_used(tmp_path, capsys):
    before = runner(tmp_path)
    trial = record(site=before.site, config={"seq_length_tokens": 8})
    Ledger(tmp_path, "w").append(trial.model_dump(mode="json"))
    assert runner(tmp_path).knows(trial.finished().trial) is False  # of another key
    assert "warn" not in capsys.readouterr().err
    Ledger(tmp_path, "v").append(record(site="there", dataset_hash="e").model_dump(mode="json"))
    assert len(runner(tmp_path).every_record()) == 2
    assert "warn: 1 trials in" in capsys.readouterr().err


def limits(manifest, host=None, ranks=2, asked=None, **train):
    site = SimpleNamespace(host=host or FakeHost().facts([Path()]))
    bench = Bench(site=site, server=SimpleNamespace(), machine=SimpleNamespace(), monitor=SimpleNamespace())
    config = example_profile().train.model_copy(update=train)
    request = SweepRequest(data=Path(), reports=Path("r"), minutes=1.0, max_workers=asked)
    return bench.training(config, request, manifest, ranks).limits


def test_loader_workers_are_limited_by_the_sites_cpus_ranks_and_the_size_of_a_batch(patterned_dataset):
    manifest = read_manifest(patterned_dataset)
    small, large = limits(manifest), limits(manifest, micro_batch_rows=64)
    assert small.cpus_per_rank == 4
    assert limits(manifest, asked=3).most()[0] == 3
    config = example_profile().train
    assert small.batch_bytes >= config.micro_batch_rows * config.seq_length_tokens * 2  # ids of two bytes
    assert large.batch_bytes == pytest.approx(32 * small.batch_bytes, rel=0.01)


def test_packed_rows_carry_the_places_of_more_samples(patterned_dataset):
    manifest = read_manifest(patterned_dataset)
    assert limits(manifest, layout="packed").batch_bytes > limits(manifest, layout="padded").batch_bytes


def test_little_shared_memory_limits_workers_at_any_site(patterned_dataset):
    tight = replace(FakeHost().facts([Path()]), shm_free_bytes=2**10)
    assert limits(read_manifest(patterned_dataset), host=tight).most()[0] == 0
