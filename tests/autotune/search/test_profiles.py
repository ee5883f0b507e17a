from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.evidence import BaselineEvidence, Evidence, JointChoice, RecipeRow, WorkersEvidence
from autotune.core.profile import Profile, profile_to_toml
from autotune.decide.ledger import ledger_sha256
from autotune.errors import MachineLacks, ProfileRefused
from autotune.search.profiles import (
    probed_here,
    read_profile,
    read_trials,
    with_evidence,
    with_workers,
    with_workers_of,
    write_profile,
)
from autotune.search.trials import records_in
from autotune.store import Ledger
from tests.autotune.profiles import but, example_profile
from tests.autotune.trials import record, records_of_example

RUNNER = SimpleNamespace(ledger=SimpleNamespace(directory=Path("nowhere")))


def _probed_again(**train) -> Profile:
    """What a probe alone gives: no worker count yet."""
    profile = example_profile()
    data = profile.train.data.model_copy(update={"loader_workers": 0})
    train = profile.train.model_copy(update={"data": data} | train)
    return profile.model_copy(update={"train": train, "evidence": Evidence(probe=profile.evidence.probe)})


@pytest.fixture
def path(tmp_path):
    """Of the example profile."""
    found = tmp_path / "p.toml"
    found.write_text(profile_to_toml(example_profile()))
    return found


def test_a_repeated_probe_keeps_the_worker_count_of_the_same_settings(path):
    kept = with_workers_of(_probed_again(), path)
    assert kept.train.data.loader_workers == 1
    assert kept.evidence.workers == example_profile().evidence.workers
    assert write_profile(path, kept) is None


def test_another_micro_batch_loses_the_worker_count_and_keeps_the_old_profile(path):
    new = with_workers_of(_probed_again(micro_batch_rows=1), path)
    assert new.evidence.workers is None
    assert read_profile(write_profile(path, new)).profile == example_profile()
    assert read_profile(path).profile == new


def test_a_file_that_is_no_profile_is_kept_when_a_profile_takes_its_place(path):
    path.write_text("mine = 1\n")
    assert write_profile(path, example_profile()).read_text() == "mine = 1\n"
    assert read_profile(path).profile == example_profile()


def test_a_micro_batch_beyond_what_was_shown_to_fit_is_refused(path):
    path.write_text(path.read_text().replace("micro_batch_rows = 2", "micro_batch_rows = 3"))
    with pytest.raises(ProfileRefused, match="more than the 2"):
        probed_here(read_profile(path))


def _found(*, chosen: int, adopted: bool | None) -> WorkersEvidence:
    found = example_profile().evidence.workers
    assert found is not None
    joint = JointChoice(
        trials=12, loader_workers=5, prefetch_batches=8, pin_memory=False, ratio_to_workers_alone=1.2,
        adopted=adopted is True,
    )  # fmt: skip
    return found.model_copy(update={"chosen": chosen, "joint": None if adopted is None else joint})


def test_a_sweep_writes_its_count_and_its_evidence_and_is_named_once():
    found = _found(chosen=3, adopted=None)
    profile = with_workers(with_workers(example_profile(), _found(chosen=2, adopted=None), RUNNER), found, RUNNER)
    assert profile.train.data == example_profile().train.data.model_copy(update={"loader_workers": 3})
    assert profile.evidence.workers == found
    assert profile.evidence.probe == example_profile().evidence.probe
    assert profile.provenance.commands == ["probe", "workers"]


def test_a_profile_names_its_own_trials_of_all_commands_by_hash_and_time(tmp_path):
    mine = [record(time_utc=f"2026-01-0{day}T00:00:00+00:00") for day in (1, 2)]
    ledger = Ledger(tmp_path, "w")
    for one in (*mine, record(time_utc="2026-01-03T00:00:00+00:00", site="there", dataset_hash="another")):
        ledger.append(one.model_dump(mode="json"))
    found = with_workers(example_profile(), _found(chosen=3, adopted=None), SimpleNamespace(ledger=ledger))
    assert found.provenance.ledger_until_utc == mine[-1].time_utc
    assert found.provenance.ledger_sha256 == ledger_sha256(records_in(tmp_path)[0][:2])


@pytest.mark.parametrize(("adopted", "loader"), [(True, (5, 8, False)), (False, (3, 2, True))])
def test_what_was_found_jointly_is_written_only_where_it_was_adopted(adopted, loader):
    found = _found(chosen=3, adopted=adopted)
    data = with_workers(example_profile(), found, RUNNER).train.data
    assert (data.loader_workers, data.prefetch_batches, data.pin_memory) == loader


def test_a_repeated_probe_keeps_what_was_adopted_jointly(path):
    swept = with_workers(example_profile(), _found(chosen=3, adopted=True), RUNNER)
    path.write_text(profile_to_toml(swept))
    assert with_workers_of(_probed_again(), path).train.data == swept.train.data


WORTH = BaselineEvidence(
    rows=[RecipeRow(name="tuned", real_tokens_per_s=[9.0], speedup=1.0, outcome="ran")],
    local_ranks=1, window_s=2.0, windows=1, seconds=3.0,
)  # fmt: skip


@pytest.mark.parametrize(("chosen", "kept"), [(1, WORTH), (2, None)])
def test_what_settings_are_worth_changes_nothing_about_them_and_goes_with_them(chosen, kept):
    profile = example_profile()
    worth = with_evidence(profile, "baseline", WORTH, RUNNER)
    assert (worth.train, worth.evidence.baseline) == (profile.train, WORTH)
    assert worth.provenance.commands == ["probe", "baseline"]
    changed = with_workers(worth, _found(chosen=chosen, adopted=None), RUNNER)
    assert changed.evidence.baseline == kept
    assert changed.provenance.commands == ["probe", *(["baseline"] if kept else []), "workers"]


def test_rates_of_a_pretended_gpu_are_not_read_either(path):
    path.write_text(path.read_text().replace("[fingerprint]", '[fingerprint]\ndriver = "0.0 (nullgpu)"'))
    with pytest.raises(MachineLacks, match="a profile's tokens/s cannot be measured on a pretended"):
        read_profile(path)


def test_of_two_profiles_of_one_name_each_has_its_own_trials(tmp_path):
    mine, reports = example_profile(), tmp_path / "reports"
    finished, damaged, check = read_trials(tmp_path / "p.toml", mine, reports)
    assert (finished, damaged, check.found) == ((), 0, "no trials")
    ledger = Ledger(reports / "p" / "ledger", "w")
    for one in (*records_of_example(), record(site="there", dataset_hash="e")):
        ledger.append(one.model_dump(mode="json"))
    ledger.append({"no": "trial"})
    theirs = mine.model_copy(update={"fingerprint": mine.fingerprint.model_copy(update={"dataset_hash": "e"})})
    own = len(records_of_example())
    for place, profile, expected in (("a", mine, (own, 1, 1)), ("b", theirs, (1, 1, own))):
        finished, damaged, check = read_trials(tmp_path / place / "p.toml", profile, reports)
        assert (len(finished), damaged, check.others) == expected
