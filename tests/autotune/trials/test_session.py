"""What phases of tuning share: runners, idle GPUs, loader limits and reports."""

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import MachineLacks
from autotune.machine.values import GpuProcess
from autotune.report.stage import build_report
from autotune.trials import other_programs, session
from autotune.trials.other_programs import require_idle_gpus
from autotune.trials.outcomes import TimedOut
from autotune.trials.session import Session, open_bench
from autotune.trials.trial_log import TrialLog
from autotune.trials.trial_machine import StartedMachine
from autotune.workers.measure import training_windows
from autotune.workers.values import SweepRequest
from testbed.examples.profiles import FINGERPRINT, but, example_profile
from testbed.examples.trials import record
from testbed.fakes import FakeGpu, FakeGpuMonitor, FakeHost
from tests.autotune.machine.test_measured_device import H200
from trainer.data.manifest import read_manifest
from trainer.environment import CPU_ENVIRONMENT

EXAMPLE = example_profile()


def session_on(manifest=None, host=None, environment=None) -> Session:
    """Return a session of which only the site and the dataset are real."""
    site = SimpleNamespace(host=host or FakeHost().facts([Path()]))
    return Session(
        site=site,
        manifest=manifest,
        server=SimpleNamespace(
            environment=os.environ if environment is None else environment
        ),
        machine=SimpleNamespace(),
    )


def runner(
    tmp_path, fingerprint=FINGERPRINT, update=lambda *_: None, expected_trials=1
):
    return session_on().runner(tmp_path, fingerprint, update, expected_trials)


def test_results_are_reused_with_the_same_settings(tmp_path):
    assert runner(tmp_path).site == runner(tmp_path).site


@pytest.mark.parametrize(
    "name",
    ["OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD"],
)
def test_changed_environment_prevents_reuse(tmp_path, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    site_before = runner(tmp_path).site
    monkeypatch.setenv(name, "1")
    assert runner(tmp_path).site != site_before


def test_environment_of_the_trials_counts_for_reuse(tmp_path):
    sites = [
        session_on(environment=environment)
        .runner(tmp_path, FINGERPRINT, lambda *_: None, 1)
        .site
        for environment in ({}, CPU_ENVIRONMENT)
    ]
    assert sites[0] != sites[1]


def test_changed_version_prevents_reuse(tmp_path, monkeypatch):
    site_before = runner(tmp_path).site
    monkeypatch.setattr("autotune.trials.trial_bench.__version__", "9.9")
    assert runner(tmp_path).site != site_before


def gpu(uuid: str, index: int, *processes: GpuProcess) -> FakeGpu:
    return FakeGpu(
        facts=replace(H200, uuid=uuid, index=index),
        used_bytes=[0],
        processes=[processes],
    )


PROCESS = GpuProcess(pid=42, used_bytes=2**30)


def test_rejects_the_only_gpu_if_it_is_busy():
    monitor = FakeGpuMonitor([gpu("a", 0, PROCESS)])
    with pytest.raises(MachineLacks, match="42") as rejection:
        require_idle_gpus(monitor, ["a"])
    assert rejection.value.next_step == "Wait until the GPU is free."


def test_busy_gpu_names_an_idle_one():
    monitor = FakeGpuMonitor([gpu("a", 0, PROCESS), gpu("b", 1, PROCESS), gpu("c", 2)])
    with pytest.raises(MachineLacks) as rejection:
        require_idle_gpus(monitor, ["a"])
    assert rejection.value.next_step.endswith("CUDA_VISIBLE_DEVICES=2.")
    require_idle_gpus(monitor, ["c"])


def test_total_is_hidden_beyond_the_expected_trials(tmp_path):
    updates = []
    showing = runner(
        tmp_path,
        update=lambda done, total, note: updates.append((done, total)),
        expected_trials=2,
    )
    for _ in range(3):
        showing.on_trial("one", None)
        showing.on_trial("one", TimedOut(detail="late"))
    assert updates == [(0, 2), (1, 2), (1, 2), (2, 2), (2, None), (3, None)]


def test_trials_record_where_they_are_made(tmp_path):
    made_on = runner(tmp_path).made_on
    assert made_on.machine == "A CPU"
    assert made_on.processors == "2 of A CPU"
    assert made_on.torch == "2.13.0"


def test_trials_on_gpus_record_their_name(tmp_path):
    on_gpus = FINGERPRINT.model_copy(update={"gpu_name": "NVIDIA H100", "gpu_count": 2})
    assert runner(tmp_path, on_gpus).made_on.machine == "2 x NVIDIA H100"


def busy_site(load_average_1min):
    host = replace(FakeHost().facts([Path()]), load_average_1min=load_average_1min)
    return SimpleNamespace(
        device="cpu", host=host, words="the CPU", gpu_absent="no driver"
    )


@pytest.fixture
def open_on(monkeypatch):
    """Return a function that opens a bench on a site without starting torch."""

    def open_on(site, age_s=0.0, choice="cpu", **options):
        monkeypatch.setattr(
            other_programs, "process_started_s", lambda: time.time() - age_s
        )
        monkeypatch.setattr(
            session,
            "open_measured_device",
            lambda *_, **__: contextlib.nullcontext((site, None)),
        )
        with open_bench(
            choice, Path(), lambda _: UnstartedMachine(), **options
        ) as bench:
            return bench

    return open_on


class UnstartedMachine(StartedMachine):
    """Machine without processes."""

    def close(self):
        """Do nothing."""

    def _ensure_started(self):
        """Do nothing."""

    def _run(self, trial):
        raise AssertionError("no trial is expected")


def test_warns_once_of_a_busy_machine(open_on, capsys):
    bench = open_on(busy_site(17.14))
    assert bench.load_average_1min == 17.14
    warning = "warning: The load average is 17.14 with 8 available CPU cores"
    assert capsys.readouterr().err.count(warning) == 1


def test_quiet_machine_causes_no_warning(open_on, capsys):
    assert open_on(busy_site(3.9)).load_average_1min == 3.9
    assert "warning" not in capsys.readouterr().err


def test_own_trials_are_no_load_of_others(open_on, capsys):
    assert open_on(busy_site(17.14), age_s=90).load_average_1min is None
    assert "warning" not in capsys.readouterr().err


def test_says_first_that_no_gpu_was_found(open_on, capsys):
    open_on(busy_site(0.1), choice="auto")
    warning, next_step, measuring = capsys.readouterr().err.splitlines()
    assert warning == "warning: no GPU found (no driver): this measures the CPU"
    assert "--device cpu" in next_step
    assert measuring.startswith("measuring on the CPU")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"choice": "cpu"}, id="chosen CPU"),
        pytest.param({"choice": "auto", "shared": True}, id="call of a function"),
    ],
)
def test_expected_cpu_causes_no_warning(open_on, capsys, options):
    open_on(busy_site(0.1), **options)
    assert "warning" not in capsys.readouterr().err


def test_trials_record_the_load_before_them(tmp_path):
    bench = replace(session_on(), load_average_1min=1.5)
    made_on = bench.runner(tmp_path, FINGERPRINT, lambda *_: None, 1).made_on
    assert made_on.load_average_1min == 1.5


def append_trial(tmp_path, trial_record, writer):
    entry = trial_record.model_dump(mode="json")
    TrialLog(tmp_path / "trials", writer).append(entry)


def test_own_trials_cause_no_warning(tmp_path, capsys):
    own = record(site=runner(tmp_path).site, config={"seq_length_tokens": 8})
    append_trial(tmp_path, own, "w")
    assert runner(tmp_path).knows(own.finished().trial) is False  # of another key
    assert "warn" not in capsys.readouterr().err


def test_warns_of_trials_of_another_profile(tmp_path, capsys):
    own = record(site=runner(tmp_path).site, config={"seq_length_tokens": 8})
    append_trial(tmp_path, own, "w")
    append_trial(tmp_path, record(site="there", dataset_hash="e"), "v")
    runner(tmp_path)
    assert "warning: 1 trials in" in capsys.readouterr().err


def limits(data, host=None, max_workers=None, **train):
    """Return the limits of DataLoader workers for two ranks on eight CPUs."""
    request = SweepRequest(
        data=Path(), reports=Path("r"), minutes=1.0, max_workers=max_workers
    )
    bench = session_on(read_manifest(data), host)
    settings = but(EXAMPLE, train=train).train
    return training_windows(bench, settings, request, 2).limits


def test_ranks_share_the_cpus(patterned_dataset):
    assert limits(patterned_dataset).cpus_per_rank == 4


def test_request_limits_loader_workers(patterned_dataset):
    assert limits(patterned_dataset, max_workers=3).max_workers()[0] == 3


def test_batch_grows_with_the_micro_batch(patterned_dataset):
    small = limits(patterned_dataset, micro_batch_size=2)
    large = limits(patterned_dataset, micro_batch_size=64)
    assert small.cpus_per_rank == 4
    assert large.batch_bytes == pytest.approx(32 * small.batch_bytes, rel=0.01)


def test_packed_batch_is_larger(patterned_dataset):
    packed = limits(patterned_dataset, layout="packed")
    padded = limits(patterned_dataset, layout="padded")
    assert packed.batch_bytes > padded.batch_bytes  # positions of more documents


def test_shared_memory_limits_loader_workers(patterned_dataset):
    tight = replace(FakeHost().facts([Path()]), shm_free_bytes=2**10)
    assert limits(patterned_dataset, host=tight).max_workers()[0] == 0


def test_report_of_several_profiles_replaces_older_one(workdir):
    profile = workdir / "p.toml"
    other_profile = workdir / "other.toml"
    other_profile.write_text(profile.read_text())
    out = workdir / "r" / "both"
    build_report([profile], workdir / "r", out)
    profile.write_text(profile.read_text().replace('name = "tiny"', 'name = "teeny"'))
    paths = build_report([profile, other_profile], workdir / "r", out)
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "both.html",
        "both.json",
        "both.md",
    ]
    assert len(json.loads(paths["json"].read_text())["profiles"]) == 2
    assert "teeny" in paths["markdown"].read_text()
