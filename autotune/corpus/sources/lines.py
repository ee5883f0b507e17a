"""Lines of a slice of a file, with bounded memory: what text and jsonl share."""

import gzip
import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from autotune.corpus.sources.base import MAX_SAMPLE_BYTES, SLICE_BYTES, Slice, SourceFile, UnusableFileError, whole

GZIP_SUFFIX = ".gz"
_STEP_BYTES = 2**16
TOO_LONG = f"longer than {MAX_SAMPLE_BYTES // 2**20} MiB"


def cut_lines(file: SourceFile) -> list[Slice]:
    """Byte ranges of equal size; a compressed file stays whole, as it can only be read from its beginning."""
    if file.path.suffix == GZIP_SUFFIX or file.size_bytes <= SLICE_BYTES:
        return whole(file)
    parts = -(-file.size_bytes // SLICE_BYTES)
    edges = [file.size_bytes * number // parts for number in range(parts + 1)]
    return [Slice(path=str(file.path), begin=begin, end=end) for begin, end in itertools.pairwise(edges)]


def lines(part: Slice) -> Iterator[tuple[int, bytes | None]]:
    """Every line that begins in a slice: its first byte's place, and its content without the line's end.

    None stands for a line that is too long to be held. The last line may end behind the slice.

    Raises:
        UnusableFileError: If a compressed file is damaged.
    """
    with opened(part) as (file, end):
        position = _line_start(file, part.begin)
        while end is None or position < end:
            line = file.readline(MAX_SAMPLE_BYTES + 2)
            if not line:
                return
            begin, position = position, position + len(line)
            if line.endswith(b"\n") or len(line) < MAX_SAMPLE_BYTES + 2:
                yield begin, line.rstrip(b"\r\n")
                continue
            while rest := file.readline(_STEP_BYTES):
                position += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield begin, None


@contextmanager
def opened(part: Slice) -> Iterator[tuple[BinaryIO, int | None]]:
    """The file, decompressed where it is, and where its slice ends; None for a slice that ends with the file."""
    if Path(part.path).suffix != GZIP_SUFFIX:
        with Path(part.path).open("rb", buffering=2**20) as file:
            yield file, part.end
        return
    try:
        with gzip.open(part.path) as packed:
            yield packed, None  # type: ignore[misc]  # reads as a BinaryIO does
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UnusableFileError(f"damaged gzip: {error}") from error


def _line_start(file: BinaryIO, begin: int) -> int:
    """Go to the first line that begins at ``begin`` or behind it; returns its place."""
    if not begin:
        return 0
    position = begin - 1
    file.seek(position)
    while rest := file.readline(_STEP_BYTES):
        position += len(rest)
        if rest.endswith(b"\n"):
            break
    return position
