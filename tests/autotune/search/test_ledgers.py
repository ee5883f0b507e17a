from autotune.search.ledgers import read_trials
from autotune.store import Ledger
from tests.autotune.profiles import example_profile
from tests.autotune.trials import record, records_of_example


def test_no_ledger_is_no_trial(tmp_path):
    found = read_trials(tmp_path / "p.toml", example_profile(), tmp_path / "reports")
    assert (found.finished, found.damaged_lines, found.check.found) == ((), 0, "no trials")


def test_of_two_profiles_of_one_name_each_has_its_own_trials(tmp_path):
    ledger = Ledger(tmp_path / "reports" / "p" / "ledger", "w")
    for one in (*records_of_example(), record(site="there", dataset_hash="e")):
        ledger.append(one.model_dump(mode="json"))
    ledger.append({"no": "trial"})
    mine = example_profile()
    theirs = mine.model_copy(update={"fingerprint": mine.fingerprint.model_copy(update={"dataset_hash": "e"})})
    found = read_trials(tmp_path / "a" / "p.toml", mine, tmp_path / "reports")
    assert (len(found.finished), found.check.others, found.damaged_lines) == (len(records_of_example()), 1, 1)
    other = read_trials(tmp_path / "b" / "p.toml", theirs, tmp_path / "reports")
    assert (len(other.finished), other.check.others) == (1, len(records_of_example()))
