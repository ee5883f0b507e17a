"""Damage that tests do to a file of a dataset."""

import os
from pathlib import Path


def cut_end(path: Path) -> None:
    """Remove the last token."""
    os.truncate(path, path.stat().st_size - 2)


def overwrite(path: Path) -> None:
    """Overwrite all bytes, header included."""
    path.write_bytes(b"x" * path.stat().st_size)


def empty_table(path: Path) -> None:
    """Leave JSON without keys."""
    path.write_text("{}")


def change_manifest(path: Path) -> None:
    """Change a number that no file depends on."""
    path.write_text(path.read_text().replace('"rejected": 0', '"rejected": 1'))


def change_one_token(path: Path) -> None:
    """Change the last token, which only the hash can notice."""
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1  # the lower of its two bytes
    path.write_bytes(raw)


def append_line(path: Path) -> None:
    """Add a line."""
    path.write_text(path.read_text() + "{}\n")


def empty(path: Path) -> None:
    """Remove the content."""
    path.write_text("")


def move_and_link(path: Path) -> None:
    """Replace a file by a symbolic link to it, outside the dataset."""
    path.symlink_to(path.rename(path.parent.parent / "outside"))
