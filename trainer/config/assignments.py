"""Assignments of the command line: ``--set train.KEY=VALUE``. No torch here."""

import copy
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.formats.errors import BadConfig

_RECIPE_KEY = re.compile(r"dropout|initializer|(^|_)eps$")
"""Keys of a transformers config that leave the shape of every tensor as it is."""


def assign_all(
    profile: Path, train: dict[str, Any], assignments: Sequence[str]
) -> list[str]:
    """Set ``train.key=value`` assignments in the ``[train]`` table of a profile.

    Values are TOML, or bare words for strings.

    Args:
        profile: Path of the profile, for messages.
        train: The table, which is changed in place.
        assignments: Assignments in their order; a later one replaces an earlier one.

    Returns:
        The dotted keys that were assigned.

    Raises:
        BadConfig: If an assignment is invalid, or makes another model.
    """
    profile_model = copy.deepcopy(train.get("model"))
    assigned_keys = [_assign(train, assignment) for assignment in assignments]
    _reject_other_model(profile, profile_model, train.get("model"))
    return assigned_keys


def _assign(train: dict[str, Any], assignment: str) -> str:
    """Set one ``train.key=value`` assignment and return its dotted key."""
    name, equals, value_text = assignment.partition("=")
    dotted_key = name.strip()
    *table_names, key = dotted_key.split(".")
    is_in_train = bool(table_names) and table_names[0] == "train"
    if not equals or not is_in_train:
        raise BadConfig(
            f"--set {assignment!r} does not match train.KEY=VALUE",
            next_step="Example: --set train.max_steps=30",
        )
    table = train
    for table_name in table_names[1:]:
        table = table.setdefault(table_name, {})
        if not isinstance(table, dict):
            raise BadConfig(
                f"--set {dotted_key}: {table_name!r} is not a table",
                next_step="Check the key.",
            )
    value = _parse_value(value_text)
    if type(value) is int and isinstance(table.get(key), float):
        # TOML and transformers distinguish 1 from 1.0; users at a prompt do not.
        value = float(value)
    table[key] = value
    return dotted_key


def _reject_other_model(
    profile: Path, profile_model: object, assigned_model: object
) -> None:
    """Reject assignments that change the model's name or shape.

    The name would no longer tell which model was trained, and the profile's micro-batch
    size and speeds are those of the model that it was tuned for.

    Raises:
        BadConfig: If the profile's model is not the one to train.
    """
    if not isinstance(profile_model, dict) or not isinstance(assigned_model, dict):
        return  # the validation of the table reports this
    name = profile_model.get("name")
    assigned_name = assigned_model.get("name")
    if assigned_name != name:
        raise BadConfig(
            f"--set train.model.name={assigned_name}: {profile} is tuned for"
            f" {name!r}, whose config would be trained under that name",
            next_step=(
                "Another model needs another profile: autotune tune --model"
                f" {assigned_name} --data DIR"
            ),
        )
    changed_key = _changed_shape_key(profile_model, assigned_model)
    if changed_key is not None:
        raise BadConfig(
            f"--set train.model.{changed_key}: {profile} is tuned for {name!r}, and"
            " with another shape it is another model",
            next_step=(
                "Another model needs another profile: autotune tune --model CONFIG.json"
                " --data DIR"
            ),
        )


def _changed_shape_key(
    profile_model: dict[str, Any], assigned_model: dict[str, Any]
) -> str | None:
    """Return the first key of a model that changes its shape; None if none does."""
    config = profile_model.get("config")
    assigned_config = assigned_model.get("config")
    if not isinstance(config, dict) or not isinstance(assigned_config, dict):
        return None  # the validation of the table reports this
    for key in sorted({*config, *assigned_config}):
        has_changed = config.get(key) != assigned_config.get(key)
        if has_changed and not _RECIPE_KEY.search(key):
            return f"config.{key}"
    if profile_model.get("null_keys") != assigned_model.get("null_keys"):
        return "null_keys"
    return None


def _parse_value(text: str) -> object:
    """Parse a TOML value; any other text is a string."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value
