"""The number of DataLoader workers that a sweep chooses is in the profile."""

import json

import pytest

from autotune.base.answer_json import jsonable
from autotune.profiles.store import read_profile


@pytest.mark.usefixtures("warm_server")
def test_writes_chosen_workers_into_the_profile(tiny_profile, says):
    sweep = ("workers", tiny_profile, "--window", "0.1s", "--max-workers", "1")
    # On a busy machine, noise may leave the number undecided until the time ends.
    printed = json.loads(says(*sweep, "--time-limit", "2min", "--json"))
    evidence = printed["evidence"]["workers"]
    stored = read_profile(tiny_profile)
    assert stored.intact
    assert stored.profile.train.data.num_workers == evidence["chosen"]
    assert jsonable(stored.profile.evidence.workers) == evidence
    assert stored.profile.provenance.commands == ["probe", "workers"]
