"""Sweeps that are interrupted, use up their budget or meet their deadline."""

import itertools
from pathlib import Path

import pytest

from autotune.errors import OutOfTime
from autotune.trials.outcomes import Measured
from testbed.examples.feeds import (
    FeedMachine,
    evidence_of,
    figures_of,
    knee_at,
    sweep_on,
)

STORAGE = "nfs:40"
"""Storage of the dataset, as trials name it: file system and device number."""
WINDOW_S = 1.0
"""Time of every window on the simulated clock."""


@pytest.fixture
def interrupted(tmp_path):
    """Return the directory of a sweep that was interrupted in its sixth window.

    The first three rounds have two windows each, so this cuts the third one in two.
    """
    trial_numbers = itertools.count(1)

    def interrupt(trial):
        if next(trial_numbers) == 6:
            raise KeyboardInterrupt

    sweep = sweep_on(FeedMachine(knee_at(2), interrupt), tmp_path, storage=STORAGE)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    return tmp_path


@pytest.fixture
def uninterrupted(tmp_path):
    """Return the same sweep, which has not begun, with a trial log of its own."""
    return sweep_on(FeedMachine(knee_at(2)), tmp_path / "other", storage=STORAGE)


def count_trials(sweep) -> int:
    """Return how many windows were measured, those from the trial log left out."""
    return len(sweep.runner.machine.trials)


def test_interrupted_sweep_resumes_from_complete_rounds(interrupted, uninterrupted):
    resumed = sweep_on(FeedMachine(knee_at(2)), interrupted, storage=STORAGE)
    assert evidence_of(resumed) == evidence_of(uninterrupted)
    # Two rounds of two windows are reused. The third is measured again completely,
    # because windows of a round must follow each other.
    assert count_trials(resumed) == count_trials(uninterrupted) - 2 * 2


def test_starts_again_on_another_file_system(interrupted, uninterrupted):
    moved = sweep_on(FeedMachine(knee_at(2)), interrupted, storage="ext4:2")
    moved.run()
    uninterrupted.run()
    assert count_trials(moved) == count_trials(uninterrupted)


NOISE = [1.04, 0.96, 1.10, 1.02, 0.94, 1.08, 1.00, 0.92, 1.06, 0.98, 0.90]
"""Factors on the rates of consecutive windows, in a loop. Their number is prime, so
that no window of a round always gets the same one."""
BUDGET_WINDOWS = 12
"""Windows that a short budget has time for."""


def noisy_machine(knee: int) -> FeedMachine:
    """Return a machine so noisy that a short budget decides nothing."""
    noise = itertools.cycle(NOISE)

    def disturb(trial):
        figures = figures_of(trial, knee_at(knee))
        figures["padded_units_per_s"] *= next(noise)
        return Measured(figures=figures)

    return FeedMachine(knee_at(knee), disturb)


def test_budget_ends_an_undecided_sweep(tmp_path):
    sweep = sweep_on(noisy_machine(3), tmp_path, budget_s=BUDGET_WINDOWS * WINDOW_S)
    workers = evidence_of(sweep)
    assert sweep.time_is_over
    # The last round, of up to four windows, began within the budget and is completed.
    assert BUDGET_WINDOWS <= count_trials(sweep) <= BUDGET_WINDOWS + 3
    fewest, most = workers.undecided_between
    assert fewest <= 3 <= most
    assert workers.choice.startswith(
        f"undecided between {fewest} and {most} after 12 s;"
        f" num_workers={workers.chosen}: "
    )


def test_windows_from_the_trial_log_count_towards_budget(tmp_path):
    budget_s = BUDGET_WINDOWS * WINDOW_S
    first = evidence_of(sweep_on(noisy_machine(3), tmp_path, budget_s=budget_s))
    again = sweep_on(noisy_machine(3), tmp_path, budget_s=budget_s)
    assert evidence_of(again) == first
    assert count_trials(again) == 0


def test_small_budget_still_measures_three_rounds(tmp_path):
    sweep = sweep_on(noisy_machine(1), tmp_path, budget_s=WINDOW_S / 2)
    sweep.run()
    assert len(sweep.rounds) == 3


def sweep_with_time_for(windows: int, directory: Path):
    """Return a noisy sweep whose deadline is half a window after some windows."""
    sweep = sweep_on(noisy_machine(3), directory)
    now_s = sweep.runner.clock.utc_now().timestamp()
    sweep.runner.budget_ends_s = now_s + (windows + 0.5) * WINDOW_S
    return sweep


def test_deadline_after_three_rounds_keeps_their_result(tmp_path):
    sweep = sweep_with_time_for(13, tmp_path)
    assert evidence_of(sweep).undecided_between
    assert count_trials(sweep) == 13
    assert sweep.time_is_over


def test_deadline_before_three_rounds_fails(tmp_path):
    # The first three rounds have two windows each.
    with pytest.raises(OutOfTime):
        sweep_with_time_for(4, tmp_path).run()
