"""Runners of a bench: which results they reuse, show and record."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autotune.trials.outcomes import TimedOut
from autotune.trials.trial_bench import Bench
from autotune.trials.trial_log import TrialLog
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import record
from trainer.environment import CPU_ENVIRONMENT


def bench(environment=None) -> Bench:
    """Return a bench whose trials have this environment, by default the present one."""
    if environment is None:
        environment = os.environ
    return Bench(
        site=SimpleNamespace(),
        server=SimpleNamespace(environment=environment),
        machine=SimpleNamespace(),
    )


def ignore_update(done, total, note):
    pass


def runner(
    tmp_path,
    fingerprint=FINGERPRINT,
    *,
    of_bench=None,
    update=ignore_update,
    expected_trials=1,
):
    """Return a runner of a bench, by default of ``bench()``."""
    if of_bench is None:
        of_bench = bench()
    return of_bench.runner(tmp_path, fingerprint, update, expected_trials)


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
    plain = runner(tmp_path, of_bench=bench(environment={}))
    on_cpu = runner(tmp_path, of_bench=bench(environment=CPU_ENVIRONMENT))
    assert plain.site != on_cpu.site


def test_changed_version_prevents_reuse(tmp_path, monkeypatch):
    site_before = runner(tmp_path).site
    monkeypatch.setattr("autotune.trials.trial_bench.__version__", "9.9")
    assert runner(tmp_path).site != site_before


def test_total_is_hidden_beyond_the_expected_trials(tmp_path):
    updates = []

    def update(done, total, note):
        updates.append((done, total))

    showing = runner(tmp_path, update=update, expected_trials=2)
    for _ in range(3):
        showing.on_trial("label", None)  # begins
        showing.on_trial("label", TimedOut(detail="late"))
    assert updates == [(0, 2), (1, 2), (1, 2), (2, 2), (2, None), (3, None)]


def test_trials_record_where_they_are_made(tmp_path):
    made_on = runner(tmp_path).made_on
    assert made_on.machine == "A CPU"
    assert made_on.processors == "2 of A CPU"
    assert made_on.torch == "2.13.0"


def test_trials_on_gpus_record_their_name(tmp_path):
    on_gpus = FINGERPRINT.model_copy(update={"gpu_name": "NVIDIA H100", "gpu_count": 2})
    assert runner(tmp_path, on_gpus).made_on.machine == "2 x NVIDIA H100"


def test_trials_record_the_load_before_them(tmp_path):
    loaded = replace(bench(), load_average_1min=1.5)
    assert runner(tmp_path, of_bench=loaded).made_on.load_average_1min == 1.5


def append_trial(tmp_path, trial_record, writer):
    entry = trial_record.model_dump(mode="json")
    TrialLog(tmp_path / "trials", writer).append(entry)


@pytest.fixture
def own_trial(tmp_path):
    """Write a trial of the bench's own site to the trial log."""
    own = record(site=runner(tmp_path).site, config={"seq_length_tokens": 8})
    append_trial(tmp_path, own, "own")
    return own


def test_own_trials_cause_no_warning(tmp_path, own_trial, capsys):
    assert not runner(tmp_path).knows(own_trial.finished().trial)  # of another key
    assert "warn" not in capsys.readouterr().err


@pytest.mark.usefixtures("own_trial")
def test_warns_of_trials_of_another_profile(tmp_path, capsys):
    append_trial(tmp_path, record(site="there", dataset_hash="e"), "other")
    runner(tmp_path)
    assert "warning: 1 trials in" in capsys.readouterr().err
