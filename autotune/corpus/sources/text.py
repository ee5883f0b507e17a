"""Lines of text and JSON, plain or in gzip, read in slices with bounded memory."""

import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from autotune.corpus.sources import base
from autotune.corpus.sources.base import (
    Reject,
    Slice,
    SourceFile,
    SourceOptions,
    UnusableFileError,
)
from trainer.formats.raw_files import list_names, text_fields

_GZIP_SUFFIX = ".gz"
_STEP_BYTES = 2**16
"""Bytes of a long line that are read at once."""
_HEAD_BYTES = 8192
"""Bytes at the beginning of a file that tell whether it is text."""
_MAX_INVALID_SHARE = 0.3
"""Largest share of these bytes that are not UTF-8. Text in another encoding stays below
it, and its lines are rejected one by one."""


def takes_text(path: Path, named: bool) -> bool:
    """Return whether a file's first bytes hold no NUL and are mostly UTF-8.

    A hidden file is only taken if it is named.
    """
    if path.name.startswith(".") and not named:
        return False
    try:
        with opened(Slice(path=str(path), begin=0, end=_HEAD_BYTES)) as (file, _):
            head = file.read(_HEAD_BYTES)
    except UnusableFileError:
        return True  # a corrupt archive of text: reading rejects it with its reason
    valid_bytes = len(head.decode(errors="ignore").encode())
    invalid_bytes = len(head) - valid_bytes
    return b"\0" not in head and invalid_bytes <= _MAX_INVALID_SHARE * len(head)


def cut_text(file: SourceFile, options: SourceOptions) -> list[Slice]:
    """Cut a file by bytes; one that is a single sample stays whole."""
    return file.whole() if options.unit == "file" else cut_lines(file)


def read_text(part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
    """Yield lines without their ends, paragraphs with line feeds inside, or the file.

    Blank lines are skipped.
    """
    read_units = {"line": lines, "paragraph": _paragraphs, "file": _file}[options.unit]
    for begin, content in read_units(part):
        where = f"{options.unit} at byte {begin}"
        if content is None:
            yield Reject(path=part.path, where=where, reason=base.TOO_LONG)
            continue
        try:
            # A byte order mark is not part of the text.
            text = content.decode() if begin else content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            yield Reject(
                path=part.path,
                where=where,
                reason=f"not UTF-8 at byte {begin + error.start}",
            )
            continue
        if text.strip():
            yield text


def _paragraphs(part: Slice) -> Iterator[tuple[int, bytes | None]]:
    """Yield the paragraphs (runs of non-blank lines) that begin in a slice.

    They are read up to their ends, even beyond the slice.
    """
    # Until the file's end: a paragraph may continue after the slice.
    everything = Slice(path=part.path, begin=part.begin, end=2**63)
    is_compressed = part.path.endswith(_GZIP_SUFFIX)
    # The first lines are the rest of an earlier paragraph.
    is_rest = part.begin > 0 and _continues(part)
    for is_blank, group in itertools.groupby(lines(everything), _is_blank):
        if is_blank or is_rest:
            is_rest = False
            continue
        first = None
        collected: list[bytes] = []
        size_bytes = 0
        for begin, line in group:
            if first is None:
                # A compressed file is one slice, whose end is not known.
                if begin >= part.end and not is_compressed:
                    return
                first = begin
            # A line that is too long has no content.
            size_bytes += base.MAX_SAMPLE_BYTES + 1 if line is None else len(line) + 1
            if line is not None and size_bytes <= base.MAX_SAMPLE_BYTES:
                collected.append(line)
            else:
                collected = []
        assert first is not None  # groups are not empty
        is_too_long = size_bytes > base.MAX_SAMPLE_BYTES
        yield first, None if is_too_long else b"\n".join(collected)


def _is_blank(line: tuple[int, bytes | None]) -> bool:
    """Return whether a line of ``lines`` is blank."""
    _, content = line
    return content is not None and not content.strip()


def _continues(part: Slice) -> bool:
    """Return whether the first line belongs to a paragraph from before the slice."""
    first_line = next(lines(part), None)
    if first_line is None:
        return True  # one line covers the slice
    start, _ = first_line
    with Path(part.path).open("rb") as file:
        end = start - 1  # the line feed that ends the line before
        while end > 0:
            begin = max(0, end - _STEP_BYTES)
            file.seek(begin)
            _, line_feed, line_end = file.read(end - begin).rpartition(b"\n")
            if line_feed or line_end.strip():
                return bool(line_end.strip())
            end = begin
    return False


def _file(part: Slice) -> Iterator[tuple[int, bytes | None]]:
    """Yield the whole file."""
    with opened(part) as (file, _):
        content = file.read(base.MAX_SAMPLE_BYTES + 1)
    yield 0, content if len(content) <= base.MAX_SAMPLE_BYTES else None


def takes_jsonl(path: Path, named: bool) -> bool:
    """Return whether a file was named, or has the suffix of JSON lines."""
    return named or path.name.removesuffix(_GZIP_SUFFIX).endswith(
        (".jsonl", ".ndjson", ".json")
    )


def read_jsonl(part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
    """Yield one field of the JSON object on every line; blank lines are skipped."""
    keys = options.field.split(".")
    for begin, line in lines(part):
        try:
            text = _field(line, keys)
        except _UnusableLineError as error:
            where = f"line at byte {begin}"
            yield Reject(path=part.path, where=where, reason=str(error))
            continue
        if text.strip():
            yield text


class _UnusableLineError(Exception):
    """A line has no text; the message is the reason."""


def _field(line: bytes | None, keys: list[str]) -> str:
    """Return the text of a field; empty for a blank line.

    Args:
        line: JSON object; None for a line that is too long.
        keys: Keys that lead to the field.

    Raises:
        _UnusableLineError: If there is no text, with the reason.
    """
    if line is None:
        raise _UnusableLineError(base.TOO_LONG)
    if not line.strip():
        return ""
    try:
        line_object = json.loads(line)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start} of the line"
        raise _UnusableLineError(reason) from error
    except ValueError as error:
        raise _UnusableLineError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise _UnusableLineError("nested too deep") from error
    name = repr(".".join(keys))
    value = line_object
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise _UnusableLineError(
                f"field {name} not found; {_fields_of(line_object)}"
            )
        value = value[key]
    if not isinstance(value, str):
        raise _UnusableLineError(
            f"field {name} is {type(value).__name__}, not text;"
            f" {_fields_of(line_object)}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = f"field {name} contains half a character"
        raise _UnusableLineError(reason) from error
    return value


def _fields_of(value: object) -> str:
    """Return the fields that a line has, as text: those of text, else all."""
    if not isinstance(value, dict):
        return f"the line is {type(value).__name__}, not an object"
    names = text_fields(value)
    if names:
        return f"fields of text: {list_names(names)}"
    return f"fields, none of text: {list_names(value) or 'none'}"


def cut_lines(file: SourceFile) -> list[Slice]:
    """Return byte ranges of equal size.

    A compressed file stays whole, as it can only be read from its beginning.
    """
    if file.path.suffix == _GZIP_SUFFIX or file.size_bytes <= base.SLICE_BYTES:
        return file.whole()
    count = math.ceil(file.size_bytes / base.SLICE_BYTES)
    edges = [file.size_bytes * number // count for number in range(count + 1)]
    return [
        Slice(path=str(file.path), begin=begin, end=end)
        for begin, end in itertools.pairwise(edges)
    ]


def lines(part: Slice) -> Iterator[tuple[int, bytes | None]]:
    """Yield the position and content of every line that begins in a slice.

    Line ends are left out, and the last line may end after the slice. The content of a
    line that is too long is None.

    Raises:
        UnusableFileError: If compressed data is corrupt.
    """
    max_line_bytes = base.MAX_SAMPLE_BYTES + len(b"\r\n")
    with opened(part) as (file, end):
        position = part.begin
        if position:  # the first line that begins there or later
            file.seek(position - 1)
            position = _line_end(file, position - 1)
        while end is None or position < end:
            line = file.readline(max_line_bytes)
            if not line:
                return
            begin = position
            position += len(line)
            if line.endswith(b"\n") or len(line) < max_line_bytes:
                yield begin, line.rstrip(b"\r\n")
                continue
            position = _line_end(file, position)
            yield begin, None


@contextmanager
def opened(part: Slice) -> Iterator[tuple[BinaryIO, int | None]]:
    """Open a file, decompressed if need be.

    Yields:
        The file, and the slice's end, which is None at the file's end.
    """
    if Path(part.path).suffix != _GZIP_SUFFIX:
        with Path(part.path).open("rb", buffering=2**20) as file:
            yield file, part.end
        return
    try:
        with gzip.open(part.path) as packed:
            yield packed, None  # type: ignore[misc]  # reads as a BinaryIO does
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnusableFileError(f"corrupt gzip: {error}") from error


def _line_end(file: BinaryIO, position: int) -> int:
    """Read from ``position`` to the line's end; return the position after it."""
    while rest := file.readline(_STEP_BYTES):
        position += len(rest)
        if rest.endswith(b"\n"):
            break
    return position
