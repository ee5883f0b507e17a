"""Tables of the targets: no setting of the trainer is lost in silence."""

import pkgutil
from typing import get_args

import pytest

from autotune.subjects.mlm.export import targets
from autotune.subjects.mlm.export.translate import export_target
from testbed.examples.profiles import example_profile
from trainer.formats.train_config import flatten_settings

TARGETS = get_args(targets.TargetName)
SETTINGS = tuple(flatten_settings(example_profile().train.model_dump(mode="json")))
"""Dotted keys of all settings of the trainer."""
TABLES = {key.partition(".")[0] for key in SETTINGS}
"""Settings and tables of settings at the top: a row may stand for a whole table."""
LAUNCH = {"launch", "nodes", "ranks"}
"""Rows on the processes, which no setting of the trainer decides."""


def rows_of(name):
    """Return the settings of a target's rows."""
    return [row.setting for row in export_target(name).rows]


def test_every_module_is_a_target():
    modules = {module.name for module in pkgutil.iter_modules(targets.__path__)}
    assert modules == {name.replace("-", "_") for name in TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_target_has_rows_for_all_settings(name):
    rows = rows_of(name)
    missing = [
        key for key in SETTINGS if key not in rows and key.partition(".")[0] not in rows
    ]
    assert missing == []


@pytest.mark.parametrize("name", TARGETS)
def test_no_row_is_for_unknown_setting(name):
    # A row on an ability that no setting decides has several words.
    keys = {row for row in rows_of(name) if " " not in row}
    assert keys - {*SETTINGS, *TABLES} <= LAUNCH


@pytest.mark.parametrize("name", TARGETS)
def test_target_has_no_setting_twice(name):
    rows = rows_of(name)
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("name", TARGETS)
def test_no_setting_is_beside_its_table(name):
    tables = {row.partition(".")[0] for row in rows_of(name) if "." in row}
    assert not tables & set(rows_of(name))
