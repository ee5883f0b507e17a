"""``text:``: a sample is a line, a paragraph, or a whole file of UTF-8."""

from collections.abc import Iterator
from pathlib import Path

from autotune.corpus.sources.base import (
    MAX_SAMPLE_BYTES,
    Reject,
    Slice,
    SourceFile,
    SourceOptions,
    UnusableFileError,
    whole,
)
from autotune.corpus.sources.lines import TOO_LONG, cut_lines, lines, opened

_BACK_BYTES = 2**16
_HEAD_BYTES = 8192
_MOST_UNDECODABLE = 0.3
"""Share of the first bytes. Text in another encoding stays below, and its lines are rejected one by one."""


class TextSource:
    """Plain text, or gzip of it."""

    kind = "text"
    libraries: tuple[str, ...] = ()
    example = "text:/data/corpus"

    def takes(self, path: Path, *, named: bool) -> bool:
        """Return whether the file begins as text does; hidden files belong to programs and must be named."""
        return (named or not path.name.startswith(".")) and _is_text(path)

    def cut(self, file: SourceFile, options: SourceOptions) -> list[Slice]:
        """By bytes; a file that is one sample stays whole."""
        return whole(file) if options.unit == "file" else cut_lines(file)

    def samples(self, part: Slice, options: SourceOptions) -> Iterator[str | Reject]:
        """Lines without their ends, paragraphs with line feeds inside, or the file; blank ones are skipped."""
        pieces = {"line": lines, "paragraph": _paragraphs, "file": _file}[options.unit](part)
        for begin, content in pieces:
            if content is None:
                yield Reject(path=part.path, where=f"{options.unit} at byte {begin}", reason=TOO_LONG)
                continue
            try:
                # Some editors begin a file with a byte order mark; it is no part of the text.
                text = content.decode() if begin else content.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                where = f"{options.unit} at byte {begin}"
                yield Reject(path=part.path, where=where, reason=f"not UTF-8 at byte {begin + error.start}")
                continue
            if text.strip():
                yield text


def _is_text(path: Path) -> bool:
    """Return whether a file's first bytes hold no NUL and are mostly UTF-8."""
    try:
        with opened(Slice(path=str(path), begin=0, end=_HEAD_BYTES)) as (file, _):
            head = file.read(_HEAD_BYTES)
    except UnusableFileError:
        return True  # a damaged archive of text: reading rejects it with its reason
    decodable = len(head.decode(errors="ignore").encode())
    return b"\0" not in head and len(head) - decodable <= _MOST_UNDECODABLE * len(head)


def _paragraphs(part: Slice) -> Iterator[tuple[int, bytes | None]]:
    """Runs of lines that are not blank. A slice owns those that begin in it, and reads them to their ends."""
    # Until the file's end: a paragraph may go on behind the slice.
    everything = Slice(path=part.path, begin=part.begin, end=2**63)
    inside = part.begin > 0 and _continues(part)
    first, collected, size = part.begin, list[bytes](), 0
    for begin, line in lines(everything):
        blank = line is not None and not line.strip()
        if inside:  # the rest of a paragraph that began before the slice
            inside = not blank
            continue
        if blank:
            if size:
                yield first, _joined(collected, size)
            collected, size = [], 0
            continue
        if not size:
            if begin >= part.end and not part.path.endswith(".gz"):
                return
            first = begin
        size += MAX_SAMPLE_BYTES + 1 if line is None else len(line) + 1
        if line is not None and size <= MAX_SAMPLE_BYTES:
            collected.append(line)
        else:
            collected = []
    if size:
        yield first, _joined(collected, size)


def _joined(collected: list[bytes], size: int) -> bytes | None:
    return b"\n".join(collected) if size <= MAX_SAMPLE_BYTES else None


def _continues(part: Slice) -> bool:
    """Whether the first line that begins in the slice belongs to a paragraph that began before it."""
    start = next((begin for begin, _ in lines(part)), None)
    if start is None:
        return True  # one line covers the slice
    with Path(part.path).open("rb") as file:
        end = start - 1  # the line feed that ends the line before
        while end > 0:
            begin = max(0, end - _BACK_BYTES)
            file.seek(begin)
            line_end = file.read(end - begin)
            _, feed, last = line_end.rpartition(b"\n")
            if last.strip():
                return True
            if feed:
                return False
            end = begin
    return False


def _file(part: Slice) -> Iterator[tuple[int, bytes | None]]:
    with opened(part) as (file, _):
        content = file.read(MAX_SAMPLE_BYTES + 1)
    yield 0, content if len(content) <= MAX_SAMPLE_BYTES else None
