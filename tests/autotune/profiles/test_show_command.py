"""``profile show``: settings, approval, and the explanations of settings."""

import json

import pytest

from autotune.profiles.toml_file import profile_to_toml
from testbed.examples.tuning import example_profile as explored_profile
from tests.autotune.profiles.profile_files import edit

SHOW = ("profile", "show", "p.toml")
EXPLORATION_WORDS = "Tried 4 of 107 other configurations"
"""First words on the exploration of ``explored_profile``."""


@pytest.fixture
def workdir(workdir_with_data):
    """Return the working directory with a dataset and a profile of this machine."""
    return workdir_with_data


@pytest.fixture
def explored(workdir):
    """Write a profile with the evidence of an exploration."""
    profile = explored_profile(dataset_hash="d")
    (workdir / "p.toml").write_text(profile_to_toml(profile))


def test_show_names_decisions(workdir, says):
    out = says(*SHOW)
    assert "micro-batch size" in out
    assert "approval: not reviewed" in out


def test_show_names_the_approval(workdir, says):
    says("profile", "approve", "p.toml", "--by", "reviewer")
    assert "approval: approved by reviewer" in says(*SHOW)


def test_show_answers_with_the_approval(workdir, says):
    says("profile", "approve", "p.toml", "--by", "reviewer")
    answer = json.loads(says(*SHOW, "--json"))
    assert answer["intact"] is True
    assert answer["approval"] == "approved"


@pytest.mark.parametrize(
    "arguments", [(), ("--explain",), ("micro_batch_size",)], ids=" ".join
)
def test_show_escapes_control_characters(workdir, says, arguments):
    choice = 'choice = "\\u001b[31m\\u202ebecause"'
    edit(workdir / "p.toml", 'choice = "because"', choice)
    created = 'created_utc = "\\u001b]0;x\\u00072026'
    edit(workdir / "p.toml", 'created_utc = "2026', created)
    out = says(*SHOW, *arguments)
    assert all(character.isprintable() or character == "\n" for character in out)


def test_explain_lists_all_settings(workdir, says):
    out = says(*SHOW, "--explain")
    assert "defaults:" in out
    assert "max_steps = 1000" in out


def test_show_key_explains_one_setting(workdir, says):
    out = says(*SHOW, "data.num_workers")
    assert "DataLoader workers per GPU" in out
    # Throughput with the chosen worker in the example's sweep, of 3 windows.
    assert "99.0 % (98.5 % to 99.5 %, 98 %), n = 3" in out
    assert "rejected" in out


def test_show_key_explains_a_group(workdir, says):
    answer = json.loads(says(*SHOW, "data", "--json"))
    keys = {explanation["key"] for explanation in answer["settings"]}
    assert keys >= {"data.path", "data.num_workers"}


def test_show_suggests_the_nearest_key(workdir, says):
    assert "'micro_batch_size'" in says(*SHOW, "micro_batch_row", code=3)


def test_explain_names_an_exploration_once(explored, says):
    out = says(*SHOW, "--explain")
    assert out.count(EXPLORATION_WORDS) == 1


def test_show_key_omits_the_exploration(explored, says):
    out = says(*SHOW, "layout")
    assert "measured: joint search of the step's settings" in out
    assert EXPLORATION_WORDS not in out
