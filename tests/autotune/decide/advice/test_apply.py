"""Advice that is followed."""

import pytest

from autotune.core.advice import Advice, SettingChange
from autotune.decide.advice import safe_changes, with_changes
from autotune.errors import BadInput
from tests.autotune.profiles import example_profile


def advice(*changes: SettingChange, safe: bool = True) -> Advice:
    return Advice(
        rule="x", severity="should", claim="", evidence=(), gain=None, cost="", changes=changes, would_change="",
        safe=safe,
    )  # fmt: skip


def test_only_safe_changes_count_and_the_first_of_two_wishes():
    found = safe_changes(
        [
            advice(SettingChange(key="micro_batch_rows", old=2, new=4)),
            advice(
                SettingChange(key="micro_batch_rows", old=2, new=8),
                SettingChange(key="head", old="dense", new="masked"),
            ),
            advice(SettingChange(key="precision", old="fp32", new="bf16"), safe=False),
        ]
    )
    assert [(change.key, change.new) for change in found] == [("micro_batch_rows", 4), ("head", "masked")]


def test_dotted_keys_reach_inner_tables():
    train = with_changes(example_profile().train, [SettingChange(key="data.loader_workers", old=1, new=5)])
    assert train.data.loader_workers == 5


def test_settings_that_are_none_are_refused():
    with pytest.raises(BadInput):
        with_changes(example_profile().train, [SettingChange(key="micro_batch_rows", old=2, new=0)])
