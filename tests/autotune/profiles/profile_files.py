"""Edits of profiles as a user makes them, for tests of commands."""

from pathlib import Path


def edit(path: Path, old: str, new: str) -> None:
    """Replace the first occurrence of a text, which the file must contain."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
