"""``text:``: a sample is a line, a paragraph, or a whole file of UTF-8."""

from collections.abc import Iterator
from pathlib import Path

from autotune.corpus.sources.base import MAX_SAMPLE_BYTES, Reject, Slice, SourceFile, SourceOptions, whole
from autotune.corpus.sources.lines import TOO_LONG, cut_lines, lines, opened

_BACK_BYTES = 2**16


class TextSource:
    """Plain text, or gzip of it."""

    kind = "text"
    libraries: tuple[str, ...] = ()
    example = "text:/data/corpus"

    def takes(self, path: Path, *, named: bool) -> bool:
        """Every file but hidden ones, which belong to programs."""
        return named or not path.name.startswith(".")

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
