from types import SimpleNamespace

import pytest

from autotune.commands.measuring import Bench
from autotune.core.profile import Fingerprint


def runner(tmp_path):
    here = Fingerprint.model_construct(device="cpu", torch="2.13.0", ram_total_bytes=8, data_filesystem="ext4")
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


def test_another_version_of_the_tool_measures_anew(tmp_path, monkeypatch):
    before = runner(tmp_path).site
    monkeypatch.setattr("autotune.commands.measuring.__version__", "9.9")
    assert runner(tmp_path).site != before
