import os
import sys

import pytest

from autotune.trials.outcomes import Measured
from autotune.trials.values import FinishedTrial, Trial
from autotune.tune import live_view
from autotune.tune.live_view import TuningView
from autotune.tune.values import Stage
from testbed.examples.trials import WINDOW_FIGURES
from testbed.fakes import FakeClock


@pytest.fixture
def view():
    stages = [Stage(name="probe", model="m"), Stage(name="workers", model="m")]
    return TuningView(planned=stages, clock=FakeClock(), budget_s=600.0)


def keeps_up(rate):
    trial = Trial(job="window", measured={"cached": False}, timeout_s=1.0)
    outcome = Measured(figures=WINDOW_FIGURES | {"units_per_s": rate})
    label = "1 loader workers, round 1"
    return FinishedTrial(
        trial=trial, outcome=outcome, seconds=1.0, label=label, from_trial_log=False
    )


def test_phase_takes_its_elapsed_time(view):
    probe, workers = view.planned
    view.begin(probe)
    assert probe.status == "running"
    view.clock.sleep(65.0)
    assert "1 min 05 s" in view._text()
    workers.status = "skipped"
    view.end(workers)
    probe.status = "done"
    view.end(probe)
    assert (probe.seconds, workers.seconds, view.elapsed_s) == (65.0, 0.0, 65.0)


def test_no_phase_is_shown_before_they_are_known(view):
    planned = view.planned
    view.planned = []
    view.clock.sleep(5.0)
    assert view._text() == "tune: loading torch, 5 s elapsed"
    view.planned = planned
    assert "about" in view._text()


def test_interrupt_stops_the_countdown(view):
    view.begin(view.planned[0])
    view.clock.sleep(30.0)
    assert "30 s elapsed, about" in view._text()
    view.interrupt()
    view.clock.sleep(6.0)
    heading, *_ = view._text().splitlines()
    assert heading == "tune: interrupted after 30 s"


def test_prints_lines_without_a_terminal(view, capsys):
    probe, workers = view.planned
    with view.open():
        view.begin(probe)
        view.trial_finished(keeps_up(9000.0))
        probe.status = "done"
        probe.summary = "66 sequences fit"
        view.end(probe)
    assert capsys.readouterr().err == "tune 1/2: probe m: 66 sequences fit\n"
    view.begin(workers)
    with view.show("workers m") as update:
        update(3, 24, "1 loader workers, round 2")
    view.trial_finished(keeps_up(4000.0))
    view.end(workers)
    assert "tune: workers m:  12 % 1 loader workers, round 2" in capsys.readouterr().err
    view.trial_finished(keeps_up(9500.0))  # trials after the last phase belong to none
    with view.show("late") as update:
        update(1, 2, "x")
    assert (workers.done, workers.expected, workers.note) == (
        3,
        24,
        "1 loader workers, round 2",
    )
    assert workers.best == "4,000 tokens/s (1 loader workers, round 1)"
    assert probe.best.startswith("9,000 ")


def test_table_ends_with_the_tuning(view, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        live_view.shutil,
        "get_terminal_size",
        lambda *_, **__: os.terminal_size((80, 24)),
    )
    monkeypatch.setenv("TERM", "xterm")
    probe = view.planned[0]
    with pytest.raises(KeyboardInterrupt), view.open():
        raise KeyboardInterrupt
    with view.open():  # which a display that was left open would refuse
        view.begin(probe)
        with view.show("probe m") as update:
            update(3, 12, "8 rows")
        view.clock.sleep(30.0)
        probe.status = "done"
        probe.summary = "66 sequences fit"
        view.end(probe)
    shown = capsys.readouterr().err
    assert "tune: 1 of 2 phases, 30 s elapsed, about 9 min 30 s left" in shown
    assert "+ probe" in shown
    assert "66 sequences fit" in shown
    assert "tune 1/2" not in shown  # no lines beside the table
