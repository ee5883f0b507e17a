import itertools
from pathlib import Path

import pytest

from autotune.core.outcome import Crashed, Measured, OutOfMemory
from autotune.errors import DoesNotFit, Undecided
from autotune.measure.clock import FakeClock
from autotune.measure.machine import FakeMachine
from autotune.search.probe import ProbeRequest, probe_model
from autotune.search.trials import TrialRunner
from autotune.store import Ledger
from tests.conftest import write_dataset
from trainer.dataset import read_manifest
from trainer.presets import model_settings

FIXED_BYTES, ROW_BYTES = 300_000_000, 20_000_000


HALF = {
    "time_utc": "2026", "site": "here", "key": "k", "job": "step", "measured": {}, "label": "l", "seconds": 1.0,
    "outcome": {"kind": "measured", "figures": {"loss": 1.0}},
}  # fmt: skip


def simulate(trial):
    """A machine on which a model takes 300 MB and each row 20 MB; 100 rows/s, a little slower when few."""
    rows = trial.measured["config"]["micro_batch_rows"]
    budget = trial.measured["memory_budget_bytes"]
    peak = FIXED_BYTES + ROW_BYTES * rows
    if budget is not None and peak > budget:
        return OutOfMemory(detail="refused")
    steps = trial.measured["warmup_steps"] + trial.measured["timed_steps"]
    seconds = (rows + 2) / 100
    return Measured(
        figures={
            "optimizer_steps": steps, "step_s": [seconds] * trial.measured["timed_steps"],
            "slot_tokens_per_step": rows * 64, "peak_bytes": peak, "outside_allocator_bytes": None, "loss": 1.0,
        }
    )  # fmt: skip


@pytest.fixture
def probe(tmp_path):
    manifest = read_manifest(write_dataset(tmp_path / "data", [[5, 6]]))
    names = itertools.count()

    def run(machine, memory_budget_bytes=1_000_000_000, max_rows=1000, site="here", ledger: Path | None = None):
        request = ProbeRequest(
            settings=model_settings("bert-mini"), manifest=manifest, seq_length_tokens=64, precision="fp32",
            layout="packed", attention_dropout=None,
            device="cpu", memory_budget_bytes=memory_budget_bytes, headroom_share=0.03, max_rows=max_rows,
            trial_timeout_s=10, device_used_before_bytes=None,
        )  # fmt: skip
        ledger = Ledger(ledger or tmp_path / "ledger", f"w{next(names)}")
        runner = TrialRunner(machine=machine, ledger=ledger, site=site, clock=FakeClock())
        return probe_model(request, runner)

    return run


def test_the_largest_micro_batch_is_found_verified_and_bounded(probe):
    machine = FakeMachine(simulate)
    found = probe(machine)
    assert (found.feasible_max, found.infeasible_min) == (35, 36)
    verified = [
        t for t in machine.trials if t.measured["config"]["micro_batch_rows"] == 35 and t.measured["timed_steps"] == 4
    ]
    assert verified[0].measured["memory_budget_bytes"] == 1_000_000_000
    assert found.predicted_peak_bytes == found.feasible_peak_bytes


def test_the_curve_ends_at_the_headroom(probe):
    assert [point.rows for point in probe(FakeMachine(simulate)).curve] == [1, 2, 4, 8, 16, 32, 33]


def test_a_finished_probe_is_repeated_from_its_ledger_without_a_trial(probe):
    first = probe(FakeMachine(simulate))
    again = FakeMachine(simulate)
    assert probe(again) == first
    assert again.trials == []


def test_an_interrupted_probe_goes_on_where_it_was(probe):
    whole = FakeMachine(simulate)
    expected = probe(whole, site="elsewhere")
    for stop in range(1, len(whole.trials)):

        def interrupt(trial, left=itertools.count(), stop=stop):  # noqa: B008 - one counter per machine is meant
            if next(left) == stop:
                raise KeyboardInterrupt
            return simulate(trial)

        site = f"stopped at {stop}"
        with pytest.raises(KeyboardInterrupt):
            probe(FakeMachine(interrupt), site=site)
        rest = FakeMachine(simulate)
        assert probe(rest, site=site) == expected
        assert len(rest.trials) == len(whole.trials) - stop


def test_results_of_another_site_are_not_taken(probe):
    probe(FakeMachine(simulate))
    other = FakeMachine(simulate)
    probe(other, site="another machine")
    assert other.trials


def test_one_row_that_does_not_fit_says_what_it_needs(probe):
    with pytest.raises(DoesNotFit, match="305 MiB"):
        probe(FakeMachine(simulate), memory_budget_bytes=200_000_000)


def test_a_crash_is_not_taken_for_a_lack_of_memory(probe):
    def crash_at_four(trial):
        return Crashed(detail="boom") if trial.measured["config"]["micro_batch_rows"] == 4 else simulate(trial)

    with pytest.raises(Undecided, match="boom"):
        probe(FakeMachine(crash_at_four))
    # A crash is tried again when the command is: it may have been mended.
    assert probe(FakeMachine(simulate)).feasible_max == 35


def test_a_size_that_fails_its_verification_is_not_the_answer(probe):
    def leaky(trial):
        rows, steps = trial.measured["config"]["micro_batch_rows"], trial.measured["timed_steps"]
        return OutOfMemory(detail="later") if rows >= 34 and steps > 1 else simulate(trial)

    found = probe(FakeMachine(leaky))
    assert (found.feasible_max, found.infeasible_min) == (33, 34)


def test_a_search_that_meets_its_limit_says_that_nothing_was_refused(probe):
    found = probe(FakeMachine(simulate), max_rows=10)
    assert (found.feasible_max, found.infeasible_min) == (10, None)


@pytest.mark.parametrize(
    "record", [{}, {"site": "here", "key": "k", "outcome": 3}, {"site": "here", "outcome": {}}, HALF]
)
def test_records_that_are_no_trials_are_passed_over(probe, tmp_path, record):
    Ledger(tmp_path / "ledger", "stranger").append(record)
    assert probe(FakeMachine(simulate)).feasible_max == 35
