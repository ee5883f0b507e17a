"""``autotune baseline`` trains windows for real, and writes them into the profile."""

import json

import pytest

from autotune.profiles.store import read_profile
from testbed.datasets import write_dataset

ONE_ROUND = ("--window", "0.1s", "--rounds", "1", "--json")


def difference(key, theirs, tuned):
    return {"key": key, "theirs": theirs, "tuned": tuned, "reason": None}


@pytest.mark.usefixtures("warm_server")
def test_writes_measured_windows_into_the_profile(tiny_profile, says):
    printed = json.loads(says("baseline", tiny_profile, *ONE_ROUND))
    rows = {row["name"]: row for row in printed["rows"]}
    assert list(rows) == ["paper", "hf-trainer", "padded", "untuned", "tuned"]
    for row in rows.values():
        assert row["outcome"] == "ran", row
        assert len(row["units_per_s"]) == 1
    assert printed["unit"] == "tokens"
    assert difference("layout", "dynamic", "packed") in rows["untuned"]["differences"]
    assert difference("mlm_head", "dense", "sparse") in rows["padded"]["differences"]
    assert "transformers' Trainer" in rows["hf-trainer"]["subject"]
    stored = read_profile(tiny_profile)
    assert stored.intact
    assert stored.profile.evidence.baseline.model_dump().items() <= printed.items()
    assert stored.profile.provenance.commands == ["probe", "baseline"]


@pytest.mark.usefixtures("warm_server")
def test_measures_no_window_twice(tiny_profile, says):
    command = ("baseline", tiny_profile, *ONE_ROUND)
    measured = json.loads(says(*command))
    trial_log = tiny_profile.parent / "reports" / "tiny" / "trials"
    files = list(trial_log.iterdir())
    reused = json.loads(says(*command))
    # The trial log keeps milliseconds.
    assert reused | {"seconds": 0} == measured | {"seconds": 0}
    assert list(trial_log.iterdir()) == files


def test_rejects_another_dataset(tiny_profile, says):
    other = write_dataset(tiny_profile.parent / "other", [[6] * 9] * 50, vocab_size=128)
    assert "dataset_hash" in says("baseline", tiny_profile, "--data", other, code=6)


def test_trainer_has_its_own_untuned_settings(tiny_profile, says):
    before = ("--untuned", "micro_batch_size=4")
    assert "Remove --untuned" in says("baseline", tiny_profile, *before, code=7)
