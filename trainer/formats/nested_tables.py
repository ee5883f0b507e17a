"""Values in nested tables, by their dotted keys. No torch here."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainer.formats.errors import BadConfig
from trainer.formats.tables import MAX_DEPTH


def flatten_table(
    table: Mapping[str, Any], prefix: str = "", *, whole: str = "", depth: int = 1
) -> dict[str, Any]:
    """Return every value in nested tables by its dotted key.

    An empty table is a value. A table below ``MAX_DEPTH`` levels is replaced by a text
    that says so.

    Args:
        table: Nested tables.
        prefix: Text before each key, such as ``train.``.
        whole: Name of tables that stay one value; empty if all are flattened.
        depth: Level of ``table``, counted from 1; only inner calls set it.
    """
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if depth > MAX_DEPTH:  # only an untrusted trial log is nested so deep
            values[key] = "nested too deep"
        elif isinstance(value, dict) and value and name != whole:
            values |= flatten_table(value, f"{key}.", whole=whole, depth=depth + 1)
        else:
            values[key] = value
    return values


def reject_infinite(value: object, where: str) -> None:
    """Check that every number in a value is finite.

    An infinite number or NaN can be neither hashed nor shown.

    Args:
        value: A number, or nested tables and lists.
        where: Name of the value in messages, such as the path of its file.

    Raises:
        BadConfig: If some number is not finite.
    """
    if isinstance(value, float):
        _check_finite(value, where)
        return
    for key, number in _floats_by_key(value):
        _check_finite(number, f"{where}: {key}")


def _check_finite(number: float, where: str) -> None:
    """Raise ``BadConfig`` if a number is not finite."""
    if not math.isfinite(number):
        raise BadConfig(
            f"{where} = {number}: the number must be finite",
            next_step="Measure it again, or correct it.",
        )


def _floats_by_key(value: object) -> Iterator[tuple[str, float]]:
    """Yield the dotted key and value of each float in nested tables and lists.

    The key of a list's element is its position.
    """
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        if isinstance(part, float):
            yield str(key), part
        else:
            for inner_key, number in _floats_by_key(part):
                yield f"{key}.{inner_key}", number
