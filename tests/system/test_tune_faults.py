import pytest

from tests.system.faults.tune import kill_tune

pytestmark = pytest.mark.system


@pytest.mark.slow
def test_killed_in_several_stages_a_tuning_goes_on_and_decides_what_its_ledger_says(tmp_path):
    found = kill_tune(tmp_path, points=3, seed=1)
    assert (found["faults"], found["runs"]) == (3, 1)
    assert found["trials_replayed"] == found["trials"] > 0
    assert found["files_read_while_it_ran"] > 0
