"""Writing of files in ``profiles/`` and ``reports/``, which must survive a crash."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import BadInput
from trainer.formats import files


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that readers see the old content or the new.

    Raises:
        BadInput: If the file cannot be written.
    """
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, text)


def check_writable(directory: Path) -> None:
    """Check that a directory is writable, or can be created, without leaving files.

    Raises:
        BadInput: If the directory is not writable, or its disk is full.
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
