"""Source types of raw data, and their files in reading order.

Types that are read as lines are in ``text``.
"""

import glob
import hashlib
import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
_TOLD_FILES = 10_000
_FILE_BYTES = 16 * 2**10
"""Number of bytes that take as long to read as a file takes to open."""


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
    from pyarrow import parquet, types

    # The default pool reserves more memory than it uses, which counts towards the
    # limit.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    field, texts = (
        options.field,
        (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_dictionary,
        ),
    )
    try:
        with parquet.ParquetFile(
            part.path, pre_buffer=False, buffer_size=2**20
        ) as file:
            if field not in file.schema_arrow.names:
                raise base.UnusableFileError(
                    f"column {field!r} not found; columns:"
                    f" {list_names(file.schema_arrow.names)}"
                )
            kind = file.schema_arrow.field(field).type
            if not any(is_text(kind) for is_text in texts):
                names = [
                    column.name
                    for column in file.schema_arrow
                    if any(is_text(column.type) for is_text in texts)
                ]
                raise base.UnusableFileError(
                    f"column {field!r} is {kind}, not text; columns of text:"
                    f" {list_names(names) or 'none'}"
                )
            batches = file.iter_batches(
                batch_size=1024, columns=[field], use_threads=False
            )
            for row, value in enumerate(
                value for batch in batches for value in batch.column(0).to_pylist()
            ):
                if not isinstance(value, str):
                    reason = (
                        "null" if value is None else f"{type(value).__name__}, not text"
                    )
                    yield Reject(path=part.path, where=f"row {row}", reason=reason)
                elif (
                    len(value) > base.MAX_SAMPLE_BYTES
                    or len(value.encode()) > base.MAX_SAMPLE_BYTES
                ):
                    yield Reject(
                        path=part.path, where=f"row {row}", reason=base.TOO_LONG
                    )
                elif value.strip():
                    yield value
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system; pyarrow's own name no error number
        raise base.UnusableFileError(f"corrupt parquet: {error}") from error


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
    kind, colon, place = spec.partition(":")
    known = ", ".join(f"{name}:" for name in SOURCES)
    if not colon:
        preparation = preparation_of(Path(spec))
        next_step = f"Did you mean {preparation.source}? Source types: {known}"
        if preparation.conversion is not None:
            next_step = preparation.next_step()
        raise BadInput(f"{spec!r} has no source type", next_step=next_step)
    if kind not in SOURCES:
        match = nearest(kind, list(SOURCES))
        hint = f"Did you mean {match}:{place}?" if match else f"Source types: {known}"
        raise BadInput(f"unknown source type {kind!r}", next_step=hint)
    if not place:
        raise BadInput(
            f"{spec!r} has no path", next_step=f"Example: {SOURCES[kind].example}"
        )
    return SOURCES[kind], place


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Files of a source.

    It has the files of its kind in reading order, the number of other files, and the
    files that cannot be read.
    """

    files: tuple[SourceFile, ...]
    other_files: int
    unreadable: tuple[Reject, ...]


def find_files(
    source: RawSource, place: str, update: Update = lambda done, total, note: None
) -> Found:
    """List the files of a kind.

    ``place`` is a directory (with all below it), a path, or a glob. A file with several
    names, by symbolic or hard links, is listed once. The order is by a hash of the
    file's name: the same in every copy of the tree, and without runs of similar files.

    Raises:
        BadInput: If there is no such file.
    """
    files: list[SourceFile] = []
    unreadable: list[Reject] = []
    other_files = 0
    seen: set[tuple[int, int]] = set()
    candidates = _candidates(source, place)
    for number, (path, named) in enumerate(candidates, 1):
        if number % _TOLD_FILES == 0:
            update(
                number,
                len(candidates),
                f"{format_count(number)} of {format_count(len(candidates))} files",
            )
        try:
            status = path.stat()
            if (
                not stat.S_ISREG(status.st_mode)
                or (status.st_dev, status.st_ino) in seen
            ):
                continue
            seen.add((status.st_dev, status.st_ino))
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
                unreadable.append(
                    Reject(
                        path=str(path),
                        where="",
                        reason=f"cannot be read: {error.strerror}",
                    )
                )
    if not files:
        what, next_step = (
            f"{place} contains no files",
            f"Pass another path, such as {source.example}",
        )
        if unreadable:
            what = (
                f"none of the {len(unreadable) + other_files} files at {place} is a"
                f" readable {source.kind} file"
            )
            next_step = (
                f"You lack permission to read {len(unreadable)}: change it, or pass"
                " another directory."
            )
        elif other_files:
            what = f"none of the {other_files} files at {place} is a {source.kind} file"
        raise BadInput(what, next_step=next_step)
    files.sort(key=lambda file: _reading_order(file.path))
    unreadable.sort(key=lambda reject: _reading_order(Path(reject.path)))
    return Found(
        files=tuple(files), other_files=other_files, unreadable=tuple(unreadable)
    )


def partitions(
    source: RawSource, files: Sequence[SourceFile], options: SourceOptions
) -> list[Partition]:
    """Group the slices of all files, in order, into partitions.

    Each partition is worth a task.
    """
    groups: list[list[Slice]] = []
    last_bytes = PARTITION_BYTES
    for part in (part for file in files for part in source.cut(file, options)):
        if last_bytes >= PARTITION_BYTES:
            groups.append([])
            last_bytes = 0
        groups[-1].append(part)
        last_bytes += max(part.end - part.begin, _FILE_BYTES)
    return [Partition(kind=source.kind, slices=tuple(group)) for group in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Input of a preparation.

    It has every source with its files, cut into partitions in reading order.
    """

    kinds: list[str]
    found: tuple[Found, ...]
    partitions: tuple[Partition, ...]

    @property
    def unreadable(self) -> list[Reject]:
        """Files that cannot be read."""
        return [reject for found in self.found for reject in found.unreadable]


def find_input(specs: Sequence[str], options: SourceOptions, update: Update) -> Input:
    """Find the files of sources.

    Raises:
        BadInput: If a source is unknown or empty.
        MachineLacks: If a library that reads it is not installed.
    """
    opened = [open_source(spec) for spec in specs]
    for source, _ in opened:
        if missing := [
            name for name in source.libraries if importlib.util.find_spec(name) is None
        ]:
            raise MachineLacks(
                f"source type {source.kind!r} requires {' and '.join(missing)}",
                next_step=install_step(
                    *({"elftools": "pyelftools"}.get(name, name) for name in missing)
                ),
            )
    found = [find_files(source, place, update) for source, place in opened]
    cut = [
        partitions(source, files.files, options)
        for (source, _), files in zip(opened, found, strict=True)
    ]
    parts = tuple(part for of_source in cut for part in of_source)
    return Input(
        kinds=sorted({source.kind for source, _ in opened}),
        found=tuple(found),
        partitions=parts,
    )


def _candidates(source: RawSource, place: str) -> list[tuple[Path, bool]]:
    """Return every path of a source, and whether it was named.

    Symbolic links are the last, so files keep their own names.
    """
    root = Path(place).expanduser().absolute()
    if root.is_dir():
        # Links to directories are not followed, which avoids endless loops.
        paths = [
            (Path(directory) / name, False)
            for directory, _, names in os.walk(root)
            for name in names
        ]
    elif root.exists():
        paths = [(root, True)]
    elif glob.has_magic(place):
        # pathlib's glob takes only relative patterns.
        paths = [(Path(match), True) for match in glob.glob(str(root), recursive=True)]  # noqa: PTH207
        if not paths:
            raise BadInput(
                f"no file matches {place!r}",
                next_step="Check the pattern, and quote it in the shell.",
            )
    else:
        close = nearest(
            root.name,
            [one.name for one in root.parent.iterdir()] if root.parent.is_dir() else [],
        )
        hint = (
            f"Did you mean {source.kind}:{Path(place).parent / close}?"
            if close
            else "Check the path."
        )
        raise BadInput(f"{place} not found", next_step=hint)
    return sorted(
        paths, key=lambda found: (found[0].is_symlink(), os.fsencode(found[0]))
    )


def _reading_order(path: Path) -> tuple[bytes, bytes]:
    return hashlib.sha256(os.fsencode(path.name)).digest(), os.fsencode(path)
