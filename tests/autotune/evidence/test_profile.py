"""The profile of every subject: its settings, and what other subjects lack."""

import pytest

from autotune.errors import NotCheckable, ProfileRejected
from autotune.evidence.profile import Constraints, Profile, update_profile
from autotune.profiles.store import with_loader_settings
from testbed.examples.own_profiles import own_profile
from testbed.examples.profiles import but, example_profile
from trainer.formats.errors import BadConfig
from trainer.formats.tables import parse_table


def tables_of(profile):
    return profile.model_dump(mode="json", by_alias=True)


def test_own_code_has_no_trainer_settings():
    profile = own_profile()
    assert not profile.has_train
    with pytest.raises(NotCheckable, match=r"of your own code: mine:build_step"):
        _ = profile.train


def test_own_code_may_lack_constraints():
    profile = own_profile().model_copy(update={"constraints": Constraints()})
    with pytest.raises(ProfileRejected, match=r"no constraints\.memory_budget_bytes"):
        _ = profile.memory_budget_bytes
    with pytest.raises(ProfileRejected, match=r"no constraints\.global_batch_tokens"):
        _ = profile.global_batch_tokens


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": {}}, "requires a"),
        ({"train": tables_of(example_profile())["train"]}, "cannot have both"),
        ({"subject": {}}, "missing key 'subject.kind'"),
        ({"settings": {"batch": [1]}}, "settings.batch"),
        ({"tuned": {}}, "unknown key 'tuned'"),
    ],
    ids=["no settings", "two tables", "no kind", "list", "old table"],
)
def test_rejects_contradictory_tables(changes, words):
    with pytest.raises(BadConfig, match=words):
        parse_table(Profile, tables_of(own_profile()) | changes, where="p.toml")


@pytest.mark.parametrize("profile", [own_profile(), example_profile()])
def test_size_is_the_chosen_value(profile):
    assert profile.size == {"batch": 7}.get(profile.subject.size, 2)


def test_fixed_argument_can_be_the_size():
    profile = own_profile()
    subject = profile.subject.model_copy(update={"size": "seq_length"})
    assert profile.model_copy(update={"subject": subject}).size == 64


def test_subject_follows_changed_trainer_settings():
    profile = example_profile()
    longer = profile.train.model_copy(update={"seq_length_tokens": 1024})
    assert profile.with_train(longer).subject.units_per_size == 1024


def test_new_setting_drops_later_evidence():
    profile = own_profile()
    commands = {"commands": ["probe", "baseline", "workers"]}
    profile = but(profile, provenance=commands)
    changed = with_loader_settings(profile, {"num_workers": 2})
    updated = update_profile(profile, command="workers", evidence={}, changed=changed)
    assert updated.settings == {"batch": 7, "num_workers": 2}
    assert updated.provenance.commands == ["probe", "workers"]


def test_same_setting_keeps_later_evidence():
    profile = but(own_profile(), provenance={"commands": ["probe", "baseline"]})
    same = with_loader_settings(profile, {"num_workers": 1})
    updated = update_profile(profile, command="workers", evidence={}, changed=same)
    assert updated.provenance.commands == ["probe", "baseline", "workers"]
