"""Files in ``profiles/`` and ``reports/``, which must survive a crash: atomic writes, and JSON in readable rows."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import BadInput
from trainer import files

_SHORT_CHARACTERS = 600


def readable_json(value: object) -> str:
    """Return JSON whose short or flat values are each on one line.

    Values that JSON does not support become text.
    """
    return f"{_rows(value, '')}\n"


def _rows(value: object, indent: str) -> str:
    flat = json.dumps(value, allow_nan=False, default=str)
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    if len(flat) <= _SHORT_CHARACTERS or not any(
        isinstance(one, dict | list | tuple) for one in inner
    ):
        return flat
    deeper = f"{indent} "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key)}: {_rows(one, deeper)}" for key, one in value.items()
        ]
        return f"{{\n{deeper}" + f",\n{deeper}".join(parts) + f"\n{indent}}}"
    return (
        f"[\n{deeper}"
        + f",\n{deeper}".join(_rows(one, deeper) for one in inner)
        + f"\n{indent}]"
    )


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
        there = next(
            place
            for place in (directory, *directory.absolute().parents)
            if place.exists()
        )
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"1")


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Translate write errors of the operating system to ``BadInput``."""
    try:
        yield
    except OSError as error:
        next_step = "Choose another path, free disk space, or change permissions."
        raise BadInput(
            f"cannot write {path}: {error.strerror or error}", next_step=next_step
        ) from error
