"""Source types of raw data, and their files in reading order.

``SOURCES`` has a row for each type; types that are read as lines are in ``text``.
``find_input`` lists the files of a request, cut into partitions.
"""

import glob
import hashlib
import importlib.util
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.next_steps import install_step
from autotune.base.units import format_count
from autotune.corpus.sources import base
from autotune.corpus.sources.base import (
    Partition,
    RawSource,
    Reject,
    Slice,
    SourceFile,
    SourceOptions,
)
from autotune.corpus.sources.text import (
    cut_lines,
    cut_text,
    read_jsonl,
    read_text,
    takes_jsonl,
    takes_text,
)
from autotune.errors import BadInput, MachineLacks
from trainer.formats.progress import Update
from trainer.formats.raw_files import list_names, preparation_of
from trainer.formats.tables import nearest

ELF_MAGIC = b"\x7fELF"
PARTITION_BYTES = 32 * 2**20
"""Minimum of raw bytes per task, so that small files share one."""
_REPORTED_FILES = 10_000
"""Number of files after which progress is shown again."""
_FILE_BYTES = 16 * 2**10
"""Number of bytes that take as long to read as a file takes to open."""
_PACKAGES = {"elftools": "pyelftools"}
"""Names on PyPI of libraries that have another name there."""


def _takes_elf(path: Path, named: bool) -> bool:
    """Check the first bytes, even of a named file.

    A directory of programs holds scripts too.
    """
    with path.open("rb") as file:
        return file.read(len(ELF_MAGIC)) == ELF_MAGIC


def _read_elf(part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
    from autotune.corpus import elf

    yield from elf.functions(Path(part.path))


def _read_parquet(part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
    """Yield the values of one column, a few rows in memory at a time."""
    import pyarrow
    from pyarrow import parquet

    # The default pool reserves more memory than it uses, which counts towards the
    # limit.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    try:
        with parquet.ParquetFile(
            part.path, pre_buffer=False, buffer_size=2**20
        ) as file:
            _check_text_column(file.schema_arrow, options.field)
            batches = file.iter_batches(
                batch_size=1024, columns=[options.field], use_threads=False
            )
            columns = (batch.column(0).to_pylist() for batch in batches)
            for row, value in enumerate(itertools.chain.from_iterable(columns)):
                reason = _reason_to_reject(value)
                if reason is not None:
                    yield Reject(path=part.path, where=f"row {row}", reason=reason)
                elif value.strip():
                    yield value
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system; pyarrow's own name no error number
        raise base.UnusableFileError(f"corrupt parquet: {error}") from error


def _check_text_column(schema: Any, name: str) -> None:
    """Check that a column of a parquet file is text.

    Raises:
        UnusableFileError: If it does not exist, or has another type.
    """
    if name not in schema.names:
        raise base.UnusableFileError(
            f"column {name!r} not found; columns: {list_names(schema.names)}"
        )
    column_type = schema.field(name).type
    if not _is_text(column_type):
        text_names = [column.name for column in schema if _is_text(column.type)]
        raise base.UnusableFileError(
            f"column {name!r} is {column_type}, not text; columns of text:"
            f" {list_names(text_names) or 'none'}"
        )


def _is_text(column_type: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_string(column_type)
        or types.is_large_string(column_type)
        or types.is_string_view(column_type)
        or types.is_dictionary(column_type)
    )


def _reason_to_reject(value: object) -> str | None:
    """Return the reason why a value of a column is no sample; None if it is one."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return f"{type(value).__name__}, not text"
    # The number of characters first, as encoding takes memory.
    limit = base.MAX_SAMPLE_BYTES
    if len(value) > limit or len(value.encode()) > limit:
        return base.TOO_LONG
    return None


SOURCES = {
    source.kind: source
    for source in (
        # The functions of x86-64 programs and libraries, static or shared, stripped or
        # not.
        RawSource(
            kind="elf",
            libraries=("capstone", "elftools"),
            takes=_takes_elf,
            samples=_read_elf,
            example="elf:/usr/bin",
        ),
        RawSource(
            kind="text",
            takes=takes_text,
            cut=cut_text,
            samples=read_text,
            example="text:/data/corpus",
        ),
        RawSource(
            kind="jsonl",
            takes=takes_jsonl,
            cut=lambda file, options: cut_lines(file),
            samples=read_jsonl,
            example="jsonl:/data/corpus.jsonl",
        ),
        # Not cut, as only a bounded child may read its structure.
        RawSource(
            kind="parquet",
            libraries=("pyarrow",),
            takes=lambda path, named: named or path.suffix == ".parquet",
            samples=_read_parquet,
            example="parquet:/data/corpus",
        ),
    )
}


def open_source(spec: str) -> tuple[RawSource, str]:
    """Return kind and path of a source such as ``elf:/usr/bin``.

    Raises:
        BadInput: If the kind or the path is missing, or the kind is unknown.
    """
    kind, colon, path = spec.partition(":")
    known = ", ".join(f"{name}:" for name in SOURCES)
    if not colon:
        preparation = preparation_of(Path(spec))
        next_step = f"Did you mean {preparation.source}? Source types: {known}"
        if preparation.conversion is not None:
            next_step = preparation.next_step()
        raise BadInput(f"{spec!r} has no source type", next_step=next_step)
    if kind not in SOURCES:
        match = nearest(kind, list(SOURCES))
        hint = f"Did you mean {match}:{path}?" if match else f"Source types: {known}"
        raise BadInput(f"unknown source type {kind!r}", next_step=hint)
    if not path:
        raise BadInput(
            f"{spec!r} has no path", next_step=f"Example: {SOURCES[kind].example}"
        )
    return SOURCES[kind], path


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFiles:
    """Files of a source."""

    files: tuple[SourceFile, ...]
    """Files of its kind, in reading order."""
    other_files: int
    """Number of files of other kinds."""
    unreadable: tuple[Reject, ...]
    """Files that cannot be read."""


def find_files(
    source: RawSource, pattern: str, update: Update = lambda done, total, note: None
) -> SourceFiles:
    """List the files of a kind.

    A file with several names, by symbolic or hard links, is listed once. The order is
    by a hash of the file's name: the same in every copy of the tree, and without runs
    of similar files.

    Args:
        source: The kind.
        pattern: A directory (with all below it), a path, or a glob.
        update: Progress display.

    Raises:
        BadInput: If there is no such file.
    """
    files: list[SourceFile] = []
    unreadable: list[Reject] = []
    other_files = 0
    # Device and inode of files that were looked at.
    seen: set[tuple[int, int]] = set()
    candidates = _candidates(source, pattern)
    for number, (path, named) in enumerate(candidates, 1):
        if number % _REPORTED_FILES == 0:
            note = f"{format_count(number)} of {format_count(len(candidates))} files"
            update(number, len(candidates), note)
        try:
            status = path.stat()
            identity = (status.st_dev, status.st_ino)
            if not stat.S_ISREG(status.st_mode) or identity in seen:
                continue
            seen.add(identity)
            if not source.takes(path, named):
                other_files += 1
                continue
            if not os.access(path, os.R_OK):
                raise PermissionError(0, "Permission denied")
            files.append(
                SourceFile(
                    path=path, size_bytes=status.st_size, modified_ns=status.st_mtime_ns
                )
            )
        except OSError as error:
            # A dangling link is ignored, an unreadable file is reported.
            if not isinstance(error, FileNotFoundError):
                reason = f"cannot be read: {error.strerror}"
                unreadable.append(Reject(path=str(path), where="", reason=reason))
    if not files:
        raise _no_files(source, pattern, len(unreadable), other_files)
    files.sort(key=lambda file: _reading_order(file.path))
    unreadable.sort(key=lambda reject: _reading_order(Path(reject.path)))
    return SourceFiles(
        files=tuple(files), other_files=other_files, unreadable=tuple(unreadable)
    )


def _no_files(
    source: RawSource, pattern: str, unreadable: int, other_files: int
) -> BadInput:
    """Return the error for a source without files of its kind."""
    if unreadable:
        return BadInput(
            f"none of the {unreadable + other_files} files at {pattern} is a readable"
            f" {source.kind} file",
            next_step=(
                f"You lack permission to read {unreadable}: change it, or pass another"
                " directory."
            ),
        )
    message = f"{pattern} contains no files"
    if other_files:
        message = (
            f"none of the {other_files} files at {pattern} is a {source.kind} file"
        )
    return BadInput(message, next_step=f"Pass another path, such as {source.example}")


def partitions(
    source: RawSource, files: Sequence[SourceFile], options: SourceOptions
) -> list[Partition]:
    """Group the slices of all files, in order, into partitions.

    Each partition is worth a task.
    """
    groups: list[list[Slice]] = []
    group_bytes = PARTITION_BYTES
    for file in files:
        for part in source.cut(file, options):
            if group_bytes >= PARTITION_BYTES:
                groups.append([])
                group_bytes = 0
            groups[-1].append(part)
            group_bytes += max(part.end - part.begin, _FILE_BYTES)
    return [Partition(kind=source.kind, slices=tuple(group)) for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Input of a preparation."""

    kinds: list[str]
    """Kinds of its sources, each once and in alphabetical order."""
    sources: tuple[SourceFiles, ...]
    """Files of each source."""
    partitions: tuple[Partition, ...]
    """Slices of all files, in reading order."""

    @property
    def unreadable(self) -> list[Reject]:
        """Files that cannot be read."""
        return [reject for source in self.sources for reject in source.unreadable]


def find_input(specs: Sequence[str], options: SourceOptions, update: Update) -> Input:
    """Find the files of sources.

    Raises:
        BadInput: If a source is unknown or empty.
        MachineLacks: If a library that reads it is not installed.
    """
    sources = [open_source(spec) for spec in specs]
    for source, _ in sources:
        _check_libraries(source)
    files = [find_files(source, pattern, update) for source, pattern in sources]
    all_partitions: list[Partition] = []
    for (source, _), source_files in zip(sources, files, strict=True):
        all_partitions += partitions(source, source_files.files, options)
    return Input(
        kinds=sorted({source.kind for source, _ in sources}),
        sources=tuple(files),
        partitions=tuple(all_partitions),
    )


def _check_libraries(source: RawSource) -> None:
    """Check that the libraries that read a source are installed.

    Raises:
        MachineLacks: If one is missing.
    """
    missing = [
        name for name in source.libraries if importlib.util.find_spec(name) is None
    ]
    if missing:
        packages = [_PACKAGES.get(name, name) for name in missing]
        raise MachineLacks(
            f"source type {source.kind!r} requires {' and '.join(missing)}",
            next_step=install_step(*packages),
        )


def _candidates(source: RawSource, pattern: str) -> list[tuple[Path, bool]]:
    """Return every path of a source, and whether it was named.

    Symbolic links are the last, so files keep their own names.

    Raises:
        BadInput: If there is no such path.
    """
    root = Path(pattern).expanduser().absolute()
    if root.is_dir():
        # Links to directories are not followed, which avoids endless loops.
        paths = [
            (Path(directory) / name, False)
            for directory, _, names in os.walk(root)
            for name in names
        ]
    elif root.exists():
        paths = [(root, True)]
    elif glob.has_magic(pattern):
        # pathlib's glob takes only relative patterns.
        paths = [(Path(match), True) for match in glob.glob(str(root), recursive=True)]  # noqa: PTH207
        if not paths:
            raise BadInput(
                f"no file matches {pattern!r}",
                next_step="Check the pattern, and quote it in the shell.",
            )
    else:
        siblings = []
        if root.parent.is_dir():
            siblings = [sibling.name for sibling in root.parent.iterdir()]
        similar = nearest(root.name, siblings)
        hint = "Check the path."
        if similar:
            hint = f"Did you mean {source.kind}:{Path(pattern).parent / similar}?"
        raise BadInput(f"{pattern} not found", next_step=hint)
    paths.sort(key=lambda pair: (pair[0].is_symlink(), os.fsencode(pair[0])))
    return paths


def _reading_order(path: Path) -> tuple[bytes, bytes]:
    """Return the key by which files are sorted: a hash of the name, then the path."""
    return hashlib.sha256(os.fsencode(path.name)).digest(), os.fsencode(path)
