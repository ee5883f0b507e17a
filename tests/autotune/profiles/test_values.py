import re
import tomllib
from pathlib import Path

import pytest

from autotune.errors import BadInput
from autotune.profiles.values import (
    ApprovalRecord,
    approval_of,
    present_sha256,
    profile_from_tables,
    profile_to_toml,
)
from testbed.examples.profiles import but, example_profile
from trainer.config.train_config import DataSettings

SHIPPED = Path(__file__).parents[3] / "profiles"


def test_a_profile_reads_back_as_it_was_written_and_a_hand_edit_is_noticed_and_not_refused():
    written = profile_to_toml(example_profile())
    assert profile_from_tables(tomllib.loads(written), where="p") == (
        example_profile(),
        True,
    )
    edited = written.replace("micro_batch_size = 2", "micro_batch_size = 1", 1)
    changed = but(example_profile(), train={"micro_batch_size": 1})
    assert profile_from_tables(tomllib.loads(edited), where="p") == (changed, False)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("micro_batch_size", "micro_batch_row", "'micro_batch_size'"),
        ("feasible_max", "feasable_max", "'feasible_max'"),
        (r"\[constraints\]", "[constraint]", "'constraints'"),
        ("num_workers = 1", "num_worker = 1", "'num_workers'"),
        *(
            (f"{key} = .*", "", key)
            for key in ("torch", "allotted_cpus", "dataset_hash", "trial_log_sha256")
        ),
    ],
)
def test_a_misspelt_or_missing_key_anywhere_is_refused_with_the_nearest(old, new, said):
    text = re.sub(
        f"^{old}",
        new,
        profile_to_toml(example_profile()),
        count=0 if new == "" else 1,
        flags=re.MULTILINE,
    )
    with pytest.raises(BadInput) as caught:
        profile_from_tables(tomllib.loads(text), where="p")
    assert said in (caught.value.next_step if new else caught.value.message)


def test_the_train_table_is_short_and_holds_what_was_decided_even_where_it_is_the_default():
    train = tomllib.loads(
        profile_to_toml(
            but(example_profile(), train={"data": DataSettings(num_workers=0)})
        )
    )["train"]
    assert {"micro_batch_size", "global_batch_size", "precision", "device"} <= set(
        train
    )
    assert train["data"]["num_workers"] == 0
    assert "weight_decay" not in train


@pytest.mark.parametrize("name", ["bert-mini-cpu.toml", "modernbert-tiny-cpu.toml"])
def test_shipped_profiles_read_as_they_were_written(name):
    tables = tomllib.loads((SHIPPED / name).read_text())
    profile, intact = profile_from_tables(tables, where=name)
    assert intact
    assert tomllib.loads(profile_to_toml(profile)) == tables


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (None, "not reviewed"),
        ((A, "approved"), "approved"),
        ((A, "rejected"), "rejected"),
        ((B, "approved"), "voided"),
        ((B, "rejected"), "not reviewed"),
    ],
)
def test_a_verdict_counts_for_just_the_content_it_was_given_on(given, state):
    said = {"by": "reviewer", "time_utc": "2026-01-01T00:00:00Z"}
    assert (
        approval_of(
            given
            and ApprovalRecord(profile_sha256=given[0], decision=given[1], **said),
            A,
        ).state
        == state
    )


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_the_recorded_hash_is_not_hashed_and_a_value_without_a_canonical_form_is_bad_input(
    value,
):
    assert present_sha256({"a": 1, "content_sha256": "x"}, where="p") == present_sha256(
        {"a": 1}, where="p"
    )
    assert present_sha256({"a": 2}, where="p") != present_sha256({"a": 1}, where="p")
    with pytest.raises(BadInput, match=r"p\.toml contains an unsupported value"):
        present_sha256({"a": value}, where="p.toml")
