"""Validation of TOML and JSON: bounded reading, strict tables, errors that suggest the nearest valid key.

Files may come from untrusted sources, so their size and nesting are checked before
their content.
"""

import difflib
import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from trainer.errors import BadConfig

MAX_DEPTH = 32
CHECK_PATH = "Check the path."


class StrictTable(BaseModel):
    """A strict, frozen table: no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True
    )


TableT = TypeVar("TableT", bound=StrictTable)


def read_toml(path: Path, *, if_missing: str = CHECK_PATH) -> dict[str, Any]:
    """Read TOML.

    Raises:
        BadConfig: If it is invalid, too large or deep, or missing, with next step
            ``if_missing``.
    """
    return dict(_read(path, 2**20, if_missing, "TOML", tomllib.loads))


def read_json(path: Path, *, max_bytes: int = 64 * 2**20) -> Any:
    """Read a JSON file.

    Raises:
        BadConfig: If it is missing, too large, too deep, or not JSON.
    """
    return _read(path, max_bytes, CHECK_PATH, "JSON", json.loads)


def parse_table(kind: type[TableT], value: object, *, where: str) -> TableT:
    """Validate data, called ``where`` in messages, into a table.

    Raise ``BadConfig`` with the first wrong key.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        message, next_step = _explain(kind, error)
        raise BadConfig(f"{where}: {message}", next_step=next_step) from error


def canonical_json(value: object) -> bytes:
    """Return the canonical form of a JSON value for hashing: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def reject_infinite(value: object, where: str) -> None:
    """Raise ``BadConfig`` for a number that is not finite, as it cannot be hashed or shown."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadConfig(
            f"{where} = {value}: the number must be finite",
            next_step="Measure it again, or correct it.",
        )
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, part in parts:
        reject_infinite(
            part, f"{where}: {key}" if ": " not in where else f"{where}.{key}"
        )


def canonical_sha256(value: object) -> str:
    """Return the SHA-256, in hexadecimal, of the canonical JSON of a value."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def nearest(name: str, known: list[str]) -> str | None:
    """Return the known name closest to a misspelt one, or None if none is close."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)


def _read(
    path: Path, max_bytes: int, if_missing: str, kind: str, parse: Callable[[str], Any]
) -> Any:
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        what = (
            f"{path} not found"
            if isinstance(error, FileNotFoundError)
            else f"cannot read {path}: {error.strerror}"
        )
        raise BadConfig(what, next_step=_close_to(path) or if_missing) from error
    if len(raw) > max_bytes:
        raise BadConfig(
            f"{path} exceeds the limit of {max_bytes:,} bytes", next_step=CHECK_PATH
        )
    try:
        value = parse(raw.decode())
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not UTF-8 text", next_step=CHECK_PATH) from error
    # Invalid syntax, or a number of too many digits.
    except (ValueError, RecursionError) as error:
        raise BadConfig(
            f"{path} is not valid {kind}: {error}", next_step="Correct the file there."
        ) from error
    level = [value]
    for _ in range(MAX_DEPTH):
        tables = (
            one.values() if isinstance(one, dict) else one
            for one in level
            if isinstance(one, dict | list)
        )
        level = list(itertools.chain.from_iterable(tables))
    if level:
        raise BadConfig(
            f"{path} exceeds the limit of {MAX_DEPTH} nested levels",
            next_step=CHECK_PATH,
        )
    return value


def _close_to(path: Path) -> str | None:
    """Return a suggestion of the file beside it with the closest name, or None."""
    try:
        beside = sorted(
            one.name for one in path.parent.iterdir() if one.suffix == path.suffix
        )
    except OSError:
        return None
    close = nearest(path.name, beside)
    return (
        None if close in (None, path.name) else f"Did you mean {path.parent / close}?"
    )


def _explain(kind: type[StrictTable], error: ValidationError) -> tuple[str, str]:
    """Return the message and next step for the first problem, unknown keys before all others."""
    problem = min(
        error.errors(), key=lambda problem: problem["type"] != "extra_forbidden"
    )
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        known = _keys_at(
            kind, [part for part in problem["loc"][:-1] if isinstance(part, str)]
        )
        match = nearest(name, known)
        closest = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0))
        hint = (
            f"Did you mean {match!r}?"
            if match
            else f"The closest of {len(known)} known keys: {closest}."
        )
        return f"unknown key {key!r}", hint
    if problem["type"] == "missing":
        return f"missing key {key!r}", f"Add {key!r}."
    message = problem["msg"].removeprefix("Value error, ")
    if not key:  # settings that cannot be used together; the message names them
        return message, "Change one of these settings."
    shown = repr(problem["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    hint = f"Correct {key!r}."
    if isinstance(problem["input"], str) and problem["type"] == "list_type":
        hint = f"Did you mean [{shown}]?"
    elif problem["type"] == "literal_error":
        match = nearest(
            str(problem["input"]), re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        )
        hint = f"Did you mean {match!r}?" if match else hint
    return f"{key} = {shown}: {message}", hint


def _keys_at(kind: type[StrictTable], path: list[str]) -> list[str]:
    table: type[BaseModel] | None = kind
    for part in path:
        field = table.model_fields.get(part) if table else None
        table = _table_in(field.annotation) if field else None
    return sorted(table.model_fields) if table else []


def _table_in(annotation: object) -> type[BaseModel] | None:
    """Return the table type inside an annotation such as ``Table | None`` or ``list[Table]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_table_in, get_args(annotation))), None)


def flat_table(
    table: Mapping[str, Any], prefix: str = "", *, whole: str = "", depth: int = 1
) -> dict[str, Any]:
    """Return every value of nested tables by its dotted key.

    Tables called ``whole`` are one value.
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        if depth > MAX_DEPTH:  # only an untrusted trial log is nested so deep
            found[f"{prefix}{name}"] = "nested too deep"
        elif isinstance(value, dict) and value and name != whole:
            found |= flat_table(value, f"{prefix}{name}.", whole=whole, depth=depth + 1)
        else:
            found[f"{prefix}{name}"] = value
    return found
