"""What to read: places become files in reading order, and files become partitions."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.units import format_count
from autotune.corpus.meter import Update
from autotune.corpus.sources.base import Partition, Reject, Slice, Source, SourceFile, SourceOptions
from autotune.errors import BadInput
from trainer.schema import nearest

PARTITION_BYTES = 32 * 2**20
"""Raw bytes that one task reads at least, so that small files share one."""
_TOLD_FILES = 10_000
_FILE_BYTES = 16 * 2**10
"""To open a file takes about as long as to read so many bytes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a source holds: its files in reading order, how many files are something else, and which are closed."""

    files: tuple[SourceFile, ...]
    other_files: int
    unreadable: tuple[Reject, ...]


def find_files(source: Source, place: str, update: Update = lambda done, total, note: None) -> Found:
    """List the files of a kind behind a directory (with all below it), a file, or a glob.

    A file with several names, by symbolic or hard links, is listed once. The order is that of a hash of the file's
    name: fixed, the same in every copy of the tree, and without the runs of similar files that an alphabet has.

    Args:
        source: Knows its files.
        place: Where to look.
        update: Told how far it is, where files are many.

    Raises:
        BadInput: If the place is missing or empty, or holds no such file.
    """
    files: list[SourceFile] = []
    unreadable: list[Reject] = []
    other_files = 0
    seen: set[tuple[int, int]] = set()
    candidates = _candidates(source, place)
    for number, (path, named) in enumerate(candidates, 1):
        if number % _TOLD_FILES == 0:
            update(number, len(candidates), f"{format_count(number)} of {format_count(len(candidates))} files")
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if not source.takes(path, named=named):
                other_files += 1
                continue
            if not os.access(path, os.R_OK):
                raise PermissionError(0, "Permission denied")
            files.append(SourceFile(path=path, size_bytes=status.st_size, modified_ns=status.st_mtime_ns))
        except OSError as error:
            # A dangling link is not a file; one that may not be read is worth telling.
            if not isinstance(error, FileNotFoundError):
                unreadable.append(Reject(path=str(path), where="", reason=f"cannot be read: {error.strerror}"))
    if not files:
        raise _nothing_found(source, place, other_files, len(unreadable))
    files.sort(key=lambda file: _reading_order(file.path))
    unreadable.sort(key=lambda reject: _reading_order(Path(reject.path)))
    return Found(files=tuple(files), other_files=other_files, unreadable=tuple(unreadable))


def partitions(source: Source, files: Sequence[SourceFile], options: SourceOptions) -> list[Partition]:
    """All slices of the files, in order, grouped until a group is worth a task."""
    groups: list[Partition] = []
    waiting: list[Slice] = []
    waiting_bytes = 0
    for part in (part for file in files for part in source.cut(file, options)):
        waiting.append(part)
        waiting_bytes += max(part.end - part.begin, _FILE_BYTES)
        if waiting_bytes >= PARTITION_BYTES:
            groups.append(Partition(kind=source.kind, slices=tuple(waiting)))
            waiting, waiting_bytes = [], 0
    if waiting:
        groups.append(Partition(kind=source.kind, slices=tuple(waiting)))
    return groups


def _candidates(source: Source, place: str) -> list[tuple[Path, bool]]:
    """Every path behind a place, and whether it was named: real names before links, so a file goes by its own name."""
    root = Path(place).expanduser().absolute()
    if root.is_dir():
        paths = [(path, False) for path in _walk(root)]
    elif root.exists():
        paths = [(root, True)]
    elif glob.has_magic(place):
        # The pattern is the user's own, absolute or not; pathlib's glob takes only relative ones.
        paths = [(Path(match), True) for match in glob.glob(str(root), recursive=True)]  # noqa: PTH207
        if not paths:
            raise BadInput(f"no file matches {place!r}", next_step="Check the pattern, and quote it for the shell.")
    else:
        beside = [one.name for one in root.parent.iterdir()] if root.parent.is_dir() else []
        close = nearest(root.name, beside)
        hint = f"Did you mean {source.kind}:{Path(place).parent / close}?" if close else "Check the path."
        raise BadInput(f"{place} does not exist", next_step=hint)
    return sorted(paths, key=lambda found: (found[0].is_symlink(), os.fsencode(found[0])))


def _walk(root: Path) -> Iterator[Path]:
    """Files at and below a directory; directories behind links are not entered, so no loop is endless."""
    for directory, _, names in os.walk(root):
        for name in names:
            yield Path(directory) / name


def _reading_order(path: Path) -> tuple[bytes, bytes]:
    return hashlib.sha256(os.fsencode(path.name)).digest(), os.fsencode(path)


def _nothing_found(source: Source, place: str, other_files: int, unreadable: int) -> BadInput:
    choose = f"Name a place that holds some, such as {source.example}"
    if unreadable:
        return BadInput(
            f"none of the {unreadable + other_files} files at {place} is a readable {source.kind} file",
            next_step=f"{unreadable} may not be read by you: ask for permission, or name another directory.",
        )
    if other_files:
        return BadInput(f"none of the {other_files} files at {place} is a {source.kind} file", next_step=choose)
    return BadInput(f"{place} holds no files", next_step=choose)
