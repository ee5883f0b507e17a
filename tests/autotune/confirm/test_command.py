"""``autotune confirm`` measures windows and a training, and writes both down."""

import json

import pytest

from autotune.profiles.recorded_trials import read_trials
from autotune.profiles.store import read_profile

BRIEFLY = ("--window", "0.1s", "--rounds", "3", "--time-limit", "100s")


@pytest.mark.usefixtures("warm_server")
def test_writes_the_promise_into_the_profile(tiny_profile, says):
    printed = json.loads(says("confirm", tiny_profile, *BRIEFLY, "--json"))
    used = printed["rows"][0]
    assert len(used["tokens_per_s"]) >= 3
    assert printed["promised_tokens_per_s"] > 0
    assert printed["window_s"] == 0.1
    # A tenth of the time limit may be too short for the start of a training.
    assert (printed["delivered"] is None) != (printed["not_delivered"] is None)

    stored = read_profile(tiny_profile)
    assert stored.intact
    assert stored.profile.evidence.confirm.model_dump().items() <= printed.items()
    assert stored.profile.train.micro_batch_size == used["micro_batch_size"]
    assert stored.profile.provenance.commands == ["probe", "confirm"]
    trials = read_trials(tiny_profile, stored.profile, tiny_profile.parent / "reports")
    assert not [name for name in trials.check.unfounded if "confirm" in name]


@pytest.mark.usefixtures("warm_server")
def test_longer_windows_are_measured_anew(tiny_profile, says):
    earlier = json.loads(says("confirm", tiny_profile, *BRIEFLY, "--json"))
    longer = ("--window", "0.2s", "--rounds", "3", "--time-limit", "100s", "--json")
    later = json.loads(says("confirm", tiny_profile, *longer))
    assert later["window_s"] == 0.2
    assert later["rows"][0]["tokens_per_s"] != earlier["rows"][0]["tokens_per_s"]
    stored = read_profile(tiny_profile)
    assert stored.profile.evidence.confirm.model_dump().items() <= later.items()


@pytest.mark.usefixtures("warm_server")
def test_no_time_for_three_rounds_changes_nothing(tiny_profile, says):
    before = tiny_profile.read_text()
    short = ("--window", "20s", "--time-limit", "2s")
    assert "no time" in says("confirm", tiny_profile, *short, code=8).lower()
    assert tiny_profile.read_text() == before
