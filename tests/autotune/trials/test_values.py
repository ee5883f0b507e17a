"""Trials, and their records in the trial log."""

import pytest

from autotune.trials.values import Trial, TrialRecord
from testbed.examples.trials import WINDOW_FIGURES, record


def test_entry_without_a_figure_is_no_record():
    entry = record("window").model_dump(mode="json")
    assert TrialRecord.of(entry) is not None
    # Older versions recorded a list of steps instead of their number.
    old_figures = WINDOW_FIGURES | {"step_s": [0.1]}
    del old_figures["steps"]
    old_outcome = {"kind": "measured", "figures": old_figures}
    assert TrialRecord.of(entry | {"outcome": old_outcome}) is None


@pytest.mark.parametrize("local_ranks", ["2", None, 0, -3, 1.5])
def test_invalid_number_of_ranks_counts_as_one(local_ranks):
    measured = {"local_ranks": local_ranks}
    assert Trial(job="step", measured=measured, timeout_s=1.0).ranks == 1
