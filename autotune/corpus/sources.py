"""What to read: a source such as ``elf:/usr/bin`` becomes an ordered list of files."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import BadInput
from trainer.schema import nearest

KINDS = ("elf",)
ELF_MAGIC = b"\x7fELF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A file that was looked at and left out."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file to read."""

    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a source holds: its ELF files in reading order, how many files are something else, and which are closed."""

    files: tuple[SourceFile, ...]
    other_files: int
    unreadable: tuple[Rejected, ...]


def find_elf_files(source: str) -> Found:
    """List the ELF files behind ``elf:`` and a directory (with all below it), a file, or a glob.

    A file with several names, by symbolic or hard links, is listed once. The order is that of a hash of the file's
    name: fixed, the same in every copy of the tree, and without the runs of similar programs that an alphabet has.

    Raises:
        BadInput: If the kind is unknown, the place is missing or empty, or it holds no ELF file.
    """
    place = _place(source)
    files: list[SourceFile] = []
    unreadable: list[Rejected] = []
    other_files = 0
    seen: set[tuple[int, int]] = set()
    for path in _candidates(place):
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with path.open("rb") as file:
                is_elf = file.read(len(ELF_MAGIC)) == ELF_MAGIC
        except OSError as error:
            # A dangling link is not a file; one that may not be read is worth telling.
            if not isinstance(error, FileNotFoundError):
                unreadable.append(Rejected(path=path, reason=f"cannot be read: {error.strerror}"))
            continue
        if is_elf:
            files.append(SourceFile(path=path, size_bytes=status.st_size))
        else:
            other_files += 1
    if not files:
        raise _nothing_found(place, other_files, len(unreadable))
    files.sort(key=lambda file: _reading_order(file.path))
    unreadable.sort(key=lambda rejected: _reading_order(rejected.path))
    return Found(files=tuple(files), other_files=other_files, unreadable=tuple(unreadable))


def _place(source: str) -> str:
    kind, colon, place = source.partition(":")
    if not colon:
        raise BadInput(f"{source!r} names no kind of source", next_step=f"Write: elf:{source}")
    if kind not in KINDS:
        match = nearest(kind, list(KINDS))
        hint = f"Did you mean {match}:{place}?" if match else f"Known kinds: {', '.join(KINDS)}."
        raise BadInput(f"unknown kind of source {kind!r}", next_step=hint)
    if not place:
        raise BadInput(f"{source!r} names no place", next_step="Write for example: elf:/usr/bin")
    return place


def _candidates(place: str) -> list[Path]:
    """Every path behind a place: real names before links, so that a file goes by its own name."""
    root = Path(place).expanduser()
    if root.is_dir():
        paths = list(_walk(root))
    elif root.exists():
        paths = [root]
    elif glob.has_magic(place):
        # The pattern is the user's own, absolute or not; pathlib's glob takes only relative ones.
        paths = [Path(match) for match in glob.glob(str(root), recursive=True)]  # noqa: PTH207
        if not paths:
            raise BadInput(f"no file matches {place!r}", next_step="Check the pattern, and quote it for the shell.")
    else:
        raise BadInput(f"{place} does not exist", next_step="Check the path after elf:")
    return sorted(paths, key=lambda path: (path.is_symlink(), os.fsencode(path)))


def _walk(root: Path) -> Iterator[Path]:
    """Files at and below a directory; directories behind links are not entered, so no loop is endless."""
    for directory, _, names in os.walk(root):
        for name in names:
            yield Path(directory) / name


def _reading_order(path: Path) -> tuple[bytes, bytes]:
    return hashlib.sha256(os.fsencode(path.name)).digest(), os.fsencode(path)


def _nothing_found(place: str, other_files: int, unreadable: int) -> BadInput:
    choose = "Name a directory of programs, such as elf:/usr/bin"
    if unreadable:
        return BadInput(
            f"none of the {unreadable + other_files} files at {place} is a readable ELF file",
            next_step=f"{unreadable} may not be read by you: ask for permission, or name another directory.",
        )
    if other_files:
        return BadInput(f"none of the {other_files} files at {place} is an ELF file", next_step=choose)
    return BadInput(f"{place} holds no files", next_step=choose)
