"""Opening of a bench: its warnings, and the load that it records."""

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.trials import opened_bench, other_programs
from autotune.trials.opened_bench import open_bench
from autotune.trials.trial_machine import StartedMachine
from testbed.fakes import FakeHost

BUSY_LOAD = 17.14
"""Load average of far more processes than the eight CPU cores can run."""
QUIET_LOAD = 3.9


def cpu_site(load_average_1min):
    host = replace(FakeHost().facts([Path()]), load_average_1min=load_average_1min)
    return SimpleNamespace(
        device="cpu", host=host, words="the CPU", gpu_absent="no driver"
    )


class UnstartedMachine(StartedMachine):
    """Machine without processes."""

    def close(self):
        """Do nothing."""

    def _ensure_started(self):
        """Do nothing."""

    def _run(self, trial):
        raise AssertionError("no trial is expected")


@pytest.fixture
def open_on(monkeypatch):
    """Return a function that opens a bench on a site without starting torch.

    This process began ``age_s`` ago.
    """

    def open_on(site, age_s=0.0, choice="cpu", **options):
        started_s = time.time() - age_s
        monkeypatch.setattr(other_programs, "process_started_s", lambda: started_s)
        monkeypatch.setattr(
            opened_bench,
            "open_measured_device",
            lambda *_, **__: contextlib.nullcontext((site, None)),
        )
        with open_bench(
            choice, Path(), lambda _: UnstartedMachine(), **options
        ) as bench:
            return bench

    return open_on


def test_warns_once_of_a_busy_machine(open_on, capsys):
    bench = open_on(cpu_site(BUSY_LOAD))
    assert bench.load_average_1min == BUSY_LOAD
    warning = "warning: The load average is 17.14 with 8 available CPU cores"
    assert capsys.readouterr().err.count(warning) == 1


def test_quiet_machine_causes_no_warning(open_on, capsys):
    assert open_on(cpu_site(QUIET_LOAD)).load_average_1min == QUIET_LOAD
    assert "warning" not in capsys.readouterr().err


def test_own_trials_are_no_load_of_others(open_on, capsys):
    # The load average covers a minute, in which only this program has run.
    assert open_on(cpu_site(BUSY_LOAD), age_s=90).load_average_1min is None
    assert "warning" not in capsys.readouterr().err


def test_says_first_that_no_gpu_was_found(open_on, capsys):
    open_on(cpu_site(QUIET_LOAD), choice="auto")
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
    open_on(cpu_site(QUIET_LOAD), **options)
    assert "warning" not in capsys.readouterr().err
