"""Checks of a profile's probe, before other commands measure with the profile."""

import pytest

from autotune.errors import ProfileRejected
from autotune.profiles.local_probe import require_local_probe
from autotune.profiles.store import StoredProfile
from testbed.examples.profiles import FINGERPRINT, but, example_profile


@pytest.fixture
def stored(tmp_path):
    """Return the example profile, as if it had been read from a file."""
    return stored_at(tmp_path / "p.toml", example_profile())


def stored_at(path, profile):
    """Return a profile as if it had been read from a path."""
    return StoredProfile(path=path, profile=profile, intact=True)


def test_returns_the_probe_of_this_machine(stored):
    probe = require_local_probe(stored, FINGERPRINT)
    assert probe == stored.profile.evidence.probe


def test_rejects_micro_batch_not_verified_to_fit(stored):
    # The example's probe verified sizes up to 2.
    edited = but(stored.profile, train={"micro_batch_size": 3})
    with pytest.raises(ProfileRejected, match="exceeds 2, the largest"):
        require_local_probe(stored_at(stored.path, edited))


def test_rejects_profile_without_probe(stored):
    unprobed = but(stored.profile, evidence={"probe": None})
    with pytest.raises(ProfileRejected, match="has no probe result") as raised:
        require_local_probe(stored_at(stored.path, unprobed))
    assert raised.value.next_step.startswith("Probe first: autotune probe")


def test_rejects_probe_of_another_dataset(stored):
    here = FINGERPRINT.model_copy(update={"dataset_hash": "other"})
    with pytest.raises(ProfileRejected, match="dataset_hash is other here") as raised:
        require_local_probe(stored, here)
    assert raised.value.next_step.startswith("Probe here first: autotune probe")
    assert raised.value.docs == "dataset-mismatch"


def test_warns_of_a_minor_difference(stored, capsys):
    here = FINGERPRINT.model_copy(update={"torch": "2.14.0"})
    require_local_probe(stored, here)
    _, err = capsys.readouterr()
    assert err == "warning: torch is 2.14.0 here, 2.13.0 in the profile\n"
