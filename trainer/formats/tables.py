"""Strict tables: read TOML and JSON files, and validate the tables in them.

Files may come from untrusted sources, so their size and nesting are checked before
their content. Errors name the wrong key and suggest the nearest valid one.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainer.formats.errors import BadConfig, unreadable

MAX_DEPTH = 32
"""Limit of nested tables and lists: far above our own files, and far below Python's
limit of recursion."""
_CHECK_PATH = "Check the path."
"""Next step if a path leads to another file than expected, or to none."""
_MAX_TOML_BYTES = 2**20
"""Limit of a TOML file, which Python parses slowly."""
_MAX_JSON_BYTES = 64 * 2**20
"""Default limit of a JSON file, such as a dataset's manifest."""
_MAX_SHOWN_CHARACTERS = 80
"""Limit of a wrong value in a message: about a line of a terminal."""
_LEAST_SIMILARITY = 0.6
"""Share of common characters from which a misspelt name has a suggestion: the default
of difflib."""


class StrictTable(BaseModel):
    """A strict, frozen table: no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )


TableT = TypeVar("TableT", bound=StrictTable)


def read_toml(path: Path, *, if_missing: str = _CHECK_PATH) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: Path of the file.
        if_missing: Next step if it is missing and no other file has a similar name.

    Raises:
        BadConfig: If the file is missing, too large, too deep, or not TOML.
        UnreadableFile: If it exists but cannot be read.
    """
    return dict(
        _read(
            path,
            file_format="TOML",
            parse=tomllib.loads,
            max_bytes=_MAX_TOML_BYTES,
            if_missing=if_missing,
        )
    )


def read_json(path: Path, *, max_bytes: int = _MAX_JSON_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        BadConfig: If the file is missing, too large, too deep, or not JSON.
        UnreadableFile: If it exists but cannot be read.
    """
    return _read(
        path,
        file_format="JSON",
        parse=json.loads,
        max_bytes=max_bytes,
        if_missing=_CHECK_PATH,
    )


def _read(
    path: Path,
    *,
    file_format: str,
    parse: Callable[[str], Any],
    max_bytes: int,
    if_missing: str,
) -> Any:
    """Read a text file and parse its content; the errors are those of ``read_toml``."""
    content = _read_bytes(path, max_bytes, if_missing)
    try:
        value = parse(content.decode())
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not UTF-8 text", next_step=_CHECK_PATH) from error
    # A ValueError is invalid syntax or a number of too many digits; a RecursionError
    # comes from deep nesting, before its levels can be counted.
    except (ValueError, RecursionError) as error:
        raise BadConfig(
            f"{path} is not valid {file_format}: {error}",
            next_step="Correct the file there.",
        ) from error
    if _is_too_deep(value):
        raise BadConfig(
            f"{path} exceeds the limit of {MAX_DEPTH} nested levels",
            next_step=_CHECK_PATH,
        )
    return value


def _read_bytes(path: Path, max_bytes: int, if_missing: str) -> bytes:
    """Read a file, and suggest another path if it is missing."""
    try:
        with path.open("rb") as file:
            # One byte above the limit tells that the file exceeds it.
            content = file.read(max_bytes + 1)
    except OSError as error:
        unreadable_error = unreadable(path, error)
        if unreadable_error is not None:
            raise unreadable_error from error
        message = f"cannot read {path}: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            message = f"{path} not found"
        next_step = _suggest_path(path) or if_missing
        raise BadConfig(message, next_step=next_step) from error
    if len(content) > max_bytes:
        raise BadConfig(
            f"{path} exceeds the limit of {max_bytes:,} bytes", next_step=_CHECK_PATH
        )
    return content


def _is_too_deep(value: object) -> bool:
    """Return whether tables and lists are nested deeper than ``MAX_DEPTH``.

    It visits one level after the other, as recursion could exceed Python's own limit.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        next_level: list[object] = []
        for part in level:
            if isinstance(part, dict):
                next_level.extend(part.values())
            elif isinstance(part, list):
                next_level.extend(part)
        level = next_level
    return bool(level)


def _suggest_path(path: Path) -> str | None:
    """Suggest the file in the same directory whose name is closest, if any is close.

    Suffixes are not compared: they are the same, which makes short names look similar.
    """
    try:
        stems = [
            neighbour.stem
            for neighbour in path.parent.iterdir()
            if neighbour.suffix == path.suffix
        ]
    except OSError:
        return None
    closest = nearest(path.stem, sorted(stems))
    if closest is None or closest == path.stem:
        return None
    return f"Did you mean {path.with_name(closest + path.suffix)}?"


def parse_table(table_type: type[TableT], value: object, *, where: str) -> TableT:
    """Validate a value and return it as a table of the given type.

    Args:
        table_type: Type of the table.
        value: Content of a TOML or JSON file, or a part of it.
        where: Name of the value in messages, such as the path of its file.

    Raises:
        BadConfig: If the value is invalid; the message names one wrong key.
    """
    try:
        return table_type.model_validate(value)
    except ValidationError as error:
        # An unknown key comes first: if it is misspelt, it explains why another key is
        # missing.
        problems = error.errors()
        unknown_keys = [
            problem for problem in problems if problem["type"] == "extra_forbidden"
        ]
        first_problem = [*unknown_keys, *problems][0]
        message, next_step = _explain(table_type, first_problem)
        raise BadConfig(f"{where}: {message}", next_step=next_step) from error


def _explain(table_type: type[StrictTable], problem: ErrorDetails) -> tuple[str, str]:
    """Return the message and next step for a problem that pydantic found."""
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}", _suggest_key(table_type, problem["loc"])
    if problem["type"] == "missing":
        return f"missing key {key!r}", f"Add {key!r}."
    message = problem["msg"].removeprefix("Value error, ")
    # Without a key, settings cannot be used with each other; the message names them.
    if not key:
        return message, "Change one of these settings."
    value = repr(problem["input"])
    if len(value) > _MAX_SHOWN_CHARACTERS:
        value = value[: _MAX_SHOWN_CHARACTERS - 3] + "..."
    next_step = _suggest_value(problem, value) or f"Correct {key!r}."
    return f"{key} = {value}: {message}", next_step


def _suggest_value(problem: ErrorDetails, value: str) -> str | None:
    """Suggest a correction of a wrong value, if one is obvious.

    ``value`` is the wrong value as the message shows it.
    """
    is_text = isinstance(problem["input"], str)
    if is_text and problem["type"] == "list_type":
        return f"Did you mean [{value}]?"
    if problem["type"] == "literal_error":
        # Pydantic lists the choices in one text: "'a', 'b' or 'c'".
        choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        match = nearest(str(problem["input"]), choices)
        if match is not None:
            return f"Did you mean {match!r}?"
    return None


def _suggest_key(table_type: type[StrictTable], location: tuple[int | str, ...]) -> str:
    """Suggest known keys for the unknown key at a location.

    The location has the keys of the tables that lead to the unknown key, and positions
    in lists, which do not matter here.
    """
    *path, unknown_key = location
    name = str(unknown_key)
    known_keys = _keys_of(table_type, [key for key in path if isinstance(key, str)])
    match = nearest(name, known_keys)
    if match is not None:
        return f"Did you mean {match!r}?"
    closest = difflib.get_close_matches(name, known_keys, n=3, cutoff=0)
    return f"The closest of {len(known_keys)} known keys: {', '.join(closest)}."


def _keys_of(table_type: type[StrictTable], path: Iterable[str]) -> list[str]:
    """Return the sorted keys of the table at a path of keys; none if it is unknown."""
    table: type[BaseModel] | None = table_type
    for name in path:
        field = fields_by_key(table).get(name) if table else None
        table = _table_type(field.annotation) if field else None
    return sorted(fields_by_key(table)) if table else []


def fields_by_key(table: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a table by their keys in files."""
    return {field.alias or name: field for name, field in table.model_fields.items()}


def _table_type(annotation: object) -> type[BaseModel] | None:
    """Return the type of table in an annotation such as ``list[Table] | None``.

    Returns:
        None if there is no table in it.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        table = _table_type(argument)
        if table is not None:
            return table
    return None


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name closest to a misspelt one, or None if none is close."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_SIMILARITY)
    return matches[0] if matches else None
