"""Lines of text and JSON, plain or in gzip, read in slices with bounded memory."""

import gzip
import itertools
import json
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
_HEAD_BYTES = 8192


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
    # Text in another encoding stays below this share, and its lines are rejected one by
    # one.
    return b"\0" not in head and len(head) - len(
        head.decode(errors="ignore").encode()
    ) <= 0.3 * len(head)


def cut_text(file: SourceFile, options: SourceOptions) -> list[Slice]:
    """Cut a file by bytes; one that is a single sample stays whole."""
    return file.whole() if options.unit == "file" else cut_lines(file)


def read_text(part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
    """Yield lines without their ends, paragraphs with line feeds inside, or the file.

    Blank lines are skipped.
    """
    for begin, content in {"line": lines, "paragraph": _paragraphs, "file": _file}[
        options.unit
    ](part):
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
    # The first lines are the rest of an earlier paragraph.
    inside = part.begin > 0 and _continues(part)
    for blank, group in itertools.groupby(
        lines(everything), lambda one: one[1] is not None and not one[1].strip()
    ):
        first, collected, size = part.begin, list[bytes](), 0
        for begin, line in () if blank or inside else group:
            if not size:
                if begin >= part.end and not part.path.endswith(".gz"):
                    return
                first = begin
            size += base.MAX_SAMPLE_BYTES + 1 if line is None else len(line) + 1
            if line is not None and size <= base.MAX_SAMPLE_BYTES:
                collected.append(line)
            else:
                collected = []
        if size:
            yield (
                first,
                b"\n".join(collected) if size <= base.MAX_SAMPLE_BYTES else None,
            )
        inside = False


def _continues(part: Slice) -> bool:
    """Return whether the first line belongs to a paragraph from before the slice."""
    start = next((begin for begin, _ in lines(part)), None)
    if start is None:
        return True  # one line covers the slice
    with Path(part.path).open("rb") as file:
        end = start - 1  # the line feed that ends the line before
        while end > 0:
            begin = max(0, end - _STEP_BYTES)
            file.seek(begin)
            _, feed, last = file.read(end - begin).rpartition(b"\n")
            if feed or last.strip():
                return bool(last.strip())
            end = begin
    return False


def _file(part: Slice) -> Iterator[tuple[int, bytes | None]]:
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
        found = base.TOO_LONG if line is None else _field(line, keys)
        if isinstance(found, tuple):
            if found[0].strip():
                yield found[0]
        elif found:
            yield Reject(path=part.path, where=f"line at byte {begin}", reason=found)


def _field(line: bytes, keys: list[str]) -> tuple[str] | str:
    """Return the text of a field.

    Returns:
        The text in a tuple, or else the reason why there is none, which is empty for a
        blank line.
    """
    if not line.strip():
        return ""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line"
    except ValueError as error:
        return f"not JSON: {error}"
    except RecursionError:
        return "nested too deep"
    line_object = value
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return f"field {'.'.join(keys)!r} not found; {_fields_of(line_object)}"
        value = value[key]
    if not isinstance(value, str):
        return (
            f"field {'.'.join(keys)!r} is {type(value).__name__}, not text;"
            f" {_fields_of(line_object)}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"field {'.'.join(keys)!r} contains half a character"
    return (value,)


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
    parts = -(-file.size_bytes // base.SLICE_BYTES)
    edges = [file.size_bytes * number // parts for number in range(parts + 1)]
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
    with opened(part) as (file, end):
        position = part.begin
        if position:  # the first line that begins there or later
            file.seek(position - 1)
            position = _line_end(file, position - 1)
        while end is None or position < end:
            line = file.readline(base.MAX_SAMPLE_BYTES + 2)
            if not line:
                return
            begin, position = position, position + len(line)
            if line.endswith(b"\n") or len(line) < base.MAX_SAMPLE_BYTES + 2:
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
