"""JSON that people can read."""

import json

_SHORT_CHARACTERS = 600
"""Longest nested value on one line."""


def readable_json(value: object) -> str:
    """Return JSON whose short or flat values are each on one line.

    Values that JSON does not support become text.
    """
    return f"{_indented(value, '')}\n"


def _indented(value: object, indent: str) -> str:
    """Return a value whose further lines are indented by ``indent``."""
    flat = json.dumps(value, allow_nan=False, default=str)
    if len(flat) <= _SHORT_CHARACTERS or not _is_nested(value):
        return flat
    deeper = f"{indent} "
    if isinstance(value, dict):
        opening, closing = "{", "}"
        parts = [
            f"{json.dumps(key)}: {_indented(item, deeper)}"
            for key, item in value.items()
        ]
    else:
        assert isinstance(value, list | tuple)
        opening, closing = "[", "]"
        parts = [_indented(item, deeper) for item in value]
    separator = f",\n{deeper}"
    return f"{opening}\n{deeper}{separator.join(parts)}\n{indent}{closing}"


def _is_nested(value: object) -> bool:
    """Return True if a list or dictionary holds another."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(item, dict | list | tuple) for item in value)
