"""Runners of a bench: which results they reuse, show and record."""

import os
from types import SimpleNamespace

import pytest

from autotune.trials.outcomes import TimedOut
from autotune.trials.trial_bench import Bench
from autotune.trials.trial_log import TrialLog
from testbed.examples.profiles import FINGERPRINT
from testbed.examples.trials import record
from trainer.formats.cpu_environment import CPU_ENVIRONMENT


def make_bench(environment=os.environ, **fields) -> Bench:
    """Return a bench that runs no trial.

    Args:
        environment: Environment of the trials.
        fields: Further fields of the bench.
    """
    return Bench(
        site=SimpleNamespace(),
        server=SimpleNamespace(environment=environment),
        machine=SimpleNamespace(),
        **fields,
    )


def ignore_progress(done, total, note):
    """Do nothing."""


def make_runner(
    directory,
    *,
    bench=None,
    fingerprint=FINGERPRINT,
    update=ignore_progress,
    expected_trials=1,
):
    """Return a runner of a bench, by default of ``make_bench()``.

    Args:
        directory: Directory of the profile among the reports.
        bench: The bench.
        fingerprint: Machine, software, model and dataset of the trials.
        update: Function that shows the progress of the trials.
        expected_trials: Number of trials beyond which no total is shown.
    """
    bench = bench or make_bench()
    return bench.runner(directory, fingerprint, update, expected_trials)


def test_results_are_reused_with_the_same_settings(tmp_path):
    assert make_runner(tmp_path).site == make_runner(tmp_path).site


@pytest.mark.parametrize(
    "name",
    ["OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD"],
)
def test_changed_environment_prevents_reuse(tmp_path, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    site_before = make_runner(tmp_path).site
    monkeypatch.setenv(name, "1")
    assert make_runner(tmp_path).site != site_before


def test_environment_of_the_trials_counts_for_reuse(tmp_path):
    plain = make_runner(tmp_path, bench=make_bench(environment={}))
    on_cpu = make_runner(tmp_path, bench=make_bench(environment=CPU_ENVIRONMENT))
    assert plain.site != on_cpu.site


def test_changed_version_prevents_reuse(tmp_path, monkeypatch):
    site_before = make_runner(tmp_path).site
    monkeypatch.setattr("autotune.trials.site_hash.__version__", "9.9")
    assert make_runner(tmp_path).site != site_before


def test_total_is_hidden_beyond_the_expected_trials(tmp_path):
    shown = []

    def record_progress(done, total, note):
        shown.append((done, total))

    runner = make_runner(tmp_path, update=record_progress, expected_trials=2)
    for _ in range(3):
        runner.on_trial("label", None)  # begins
        runner.on_trial("label", TimedOut(detail="late"))
    # Finished trials and their total, as each trial begins and ends.
    assert shown == [(0, 2), (1, 2), (1, 2), (2, 2), (2, None), (3, None)]


def test_trials_record_where_they_are_made(tmp_path):
    made_on = make_runner(tmp_path).made_on
    assert made_on.machine == "A CPU"
    assert made_on.processors == "2 of A CPU"
    assert made_on.torch == "2.13.0"


def test_trials_on_gpus_record_their_name(tmp_path):
    on_gpus = FINGERPRINT.model_copy(update={"gpu_name": "NVIDIA H100", "gpu_count": 2})
    runner = make_runner(tmp_path, fingerprint=on_gpus)
    assert runner.made_on.machine == "2 x NVIDIA H100"


def test_trials_record_the_load_before_them(tmp_path):
    runner = make_runner(tmp_path, bench=make_bench(load_average_1min=1.5))
    assert runner.made_on.load_average_1min == 1.5


def append_trial(directory, trial_record, *, writer):
    """Append a trial to the trial log of the runners of a directory."""
    entry = trial_record.model_dump(mode="json")
    TrialLog(directory / "trials", writer).append(entry)


@pytest.fixture
def own_trial(tmp_path):
    """Return a trial of the bench's own site, which is in the trial log."""
    trial_record = record(
        site=make_runner(tmp_path).site, config={"seq_length_tokens": 8}
    )
    append_trial(tmp_path, trial_record, writer="own")
    return trial_record


def test_own_trials_cause_no_warning(tmp_path, own_trial, capsys):
    runner = make_runner(tmp_path)
    # In the log it has the key "k", which is no hash of a trial.
    assert not runner.knows(own_trial.finished().trial)
    assert "warn" not in capsys.readouterr().err


@pytest.mark.usefixtures("own_trial")
def test_warns_of_trials_of_another_profile(tmp_path, capsys):
    foreign_trial = record(site="there", dataset_hash="e")
    append_trial(tmp_path, foreign_trial, writer="other")
    make_runner(tmp_path)
    assert "warning: 1 trials in" in capsys.readouterr().err
