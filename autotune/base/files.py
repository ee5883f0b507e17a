"""Files in ``profiles/`` and ``reports/``, which must survive a crash.

Atomic writes, and JSON that reads well.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import BadInput
from trainer import files

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


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new.

    Raises:
        BadInput: If it cannot be written.
    """
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, text)


def check_writable(directory: Path) -> None:
    """Check that a directory is writable, or can be created, without leaving files.

    Raises:
        BadInput: If it cannot.
    """
    with translate_write_errors(directory):
        existing = next(
            ancestor
            for ancestor in (directory, *directory.absolute().parents)
            if ancestor.exists()
        )
        # A full disk fails only at the write.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"1")


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Translate write errors of the operating system to ``BadInput``."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror or error}",
            next_step="Choose another path, free disk space, or change permissions.",
        ) from error
