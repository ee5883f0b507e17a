import re
import tomllib
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.profiles.toml_file import (
    present_sha256,
    profile_from_tables,
    profile_to_toml,
)
from testbed.examples.profiles import but, example_profile
from trainer.formats.train_config import DataSettings

SHIPPED = Path(__file__).parents[3] / "profiles"
"""Profiles in the repository."""


def test_profile_reads_back_as_written():
    tables = tomllib.loads(profile_to_toml(example_profile()))
    assert profile_from_tables(tables, where="p") == (example_profile(), True)


def test_hand_edit_is_noticed():
    written = profile_to_toml(example_profile())
    edited = written.replace("micro_batch_size = 2", "micro_batch_size = 1", 1)
    changed = but(example_profile(), train={"micro_batch_size": 1})
    assert profile_from_tables(tomllib.loads(edited), where="p") == (changed, False)


@pytest.mark.parametrize(
    ("key", "misspelled", "suggestion"),
    [
        ("micro_batch_size", "micro_batch_row", "'micro_batch_size'"),
        ("feasible_max", "feasable_max", "'feasible_max'"),
        (r"\[constraints\]", "[constraint]", "'constraints'"),
        ("num_workers = 1", "num_worker = 1", "'num_workers'"),
    ],
    ids=["train", "evidence", "table", "nested table"],
)
def test_rejects_unknown_key_with_a_suggestion(key, misspelled, suggestion):
    written = profile_to_toml(example_profile())
    text = re.sub(f"^{key}", misspelled, written, count=1, flags=re.MULTILINE)
    with pytest.raises(BadInput) as caught:
        profile_from_tables(tomllib.loads(text), where="p")
    assert suggestion in caught.value.next_step


@pytest.mark.parametrize(
    "key", ["torch", "allotted_cpus", "dataset_hash", "trial_log_sha256"]
)
def test_rejects_missing_key(key):
    written = profile_to_toml(example_profile())
    text = re.sub(f"^{key} = .*", "", written, flags=re.MULTILINE)
    with pytest.raises(BadInput) as caught:
        profile_from_tables(tomllib.loads(text), where="p")
    assert key in caught.value.message


def test_train_table_holds_decisions_only():
    profile = but(example_profile(), train={"data": DataSettings(num_workers=0)})
    train = tomllib.loads(profile_to_toml(profile))["train"]
    assert train.keys() >= {
        "micro_batch_size",
        "global_batch_size",
        "precision",
        "device",
    }
    # Decided, even if it is the default.
    assert train["data"]["num_workers"] == 0
    assert "weight_decay" not in train


@pytest.mark.parametrize("name", ["bert-mini-cpu.toml", "modernbert-tiny-cpu.toml"])
def test_shipped_profile_is_intact(name):
    tables = tomllib.loads((SHIPPED / name).read_text())
    profile, intact = profile_from_tables(tables, where=name)
    assert intact
    assert tomllib.loads(profile_to_toml(profile)) == tables


def test_content_hash_excludes_the_recorded_hash():
    without_hash = present_sha256({"a": 1}, where="p")
    with_hash = present_sha256({"a": 1, "content_sha256": "x"}, where="p")
    assert with_hash == without_hash
    assert present_sha256({"a": 2}, where="p") != without_hash


@pytest.mark.parametrize(
    "value", [float("nan"), object()], ids=["not finite", "no TOML type"]
)
def test_rejects_value_without_canonical_form(value):
    with pytest.raises(BadInput, match=r"p\.toml contains an unsupported value"):
        present_sha256({"a": value}, where="p.toml")
