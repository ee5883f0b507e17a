"""Damage that tests do to a file of a dataset."""

import os
from pathlib import Path

BYTES_PER_TOKEN = 2


def cut_last_token(path: Path) -> None:
    os.truncate(path, path.stat().st_size - BYTES_PER_TOKEN)


def overwrite_with_text(path: Path) -> None:
    """Overwrite all bytes, header included, by as many letters."""
    path.write_bytes(b"x" * path.stat().st_size)


def write_empty_table(path: Path) -> None:
    """Replace the content by JSON without keys."""
    path.write_text("{}")


def change_manifest(path: Path) -> None:
    """Change a number that no file depends on."""
    path.write_text(path.read_text().replace('"rejected": 0', '"rejected": 1'))


def change_one_token(path: Path) -> None:
    """Change the last token, which only the hash can notice."""
    content = bytearray(path.read_bytes())
    content[-BYTES_PER_TOKEN] ^= 1  # its lower byte
    path.write_bytes(content)


def flip_last_bit(path: Path) -> None:
    """Flip the lowest bit of the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def append_line(path: Path) -> None:
    path.write_text(path.read_text() + "{}\n")


def remove_content(path: Path) -> None:
    path.write_text("")


def move_and_link(path: Path) -> None:
    """Move a file out of the dataset, and replace it by a symbolic link to it."""
    path.symlink_to(path.rename(path.parent.parent / "outside"))
