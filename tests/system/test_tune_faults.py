import pytest

from tests.system.faults.tune import kill_tune

pytestmark = pytest.mark.system


def test_killed_in_a_stage_a_tuning_goes_on_and_decides_what_its_ledger_says(tmp_path):
    found = kill_tune(tmp_path, points=1, seed=1)
    assert (found["faults"], found["runs"]) == (1, 1)
    assert found["trials_replayed"] == found["trials"] > 0
    assert found["files_read_while_it_ran"] > 0
