"""Interface of the sources of raw data, and the values that they share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SLICE_BYTES = 32 * 2**20
"""Size of slices of large files, for parallel reading and small losses."""
MAX_SAMPLE_BYTES = 8 * 2**20
"""Maximum size of a sample; larger ones are rejected to bound memory."""
TOO_LONG = f"longer than {MAX_SAMPLE_BYTES // 2**20} MiB"
"""Reason to reject such a sample."""


class UnusableFileError(Exception):
    """The whole file is unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a file: bytes ``begin`` to ``end``.

    It is the whole file if its kind cannot be cut.
    """

    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Input of one task: slices in reading order, all of one kind."""

    kind: str
    slices: tuple[Slice, ...]

    @property
    def raw_bytes(self) -> int:
        """Total size of the slices."""
        return sum(part.end - part.begin for part in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Input that was left out because it could not be used."""

    path: str
    where: str
    """Position in the file, in words; empty for a whole file."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file to read."""

    path: Path
    size_bytes: int
    modified_ns: int
    """Time of the last modification, in nanoseconds of Unix time."""

    def whole(self) -> list[Slice]:
        """Return the file as one slice."""
        return [Slice(path=str(self.path), begin=0, end=self.size_bytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options for reading files."""

    field: str = "text"
    """Field or column with the text, in jsonl and parquet; dots lead into nested
    objects of jsonl."""
    unit: Literal["line", "paragraph", "file"] = "line"
    """Sample of a text file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSource:
    """One kind of raw data."""

    kind: str
    """Name of the kind, before the colon of a source."""
    libraries: tuple[str, ...] = ()
    """Libraries that read it."""
    takes: Callable[[Path, bool], bool]
    """Function that tests if a file is of this kind; its flag is True if you named the
    file, or a pattern for it."""
    cut: Callable[[SourceFile, SourceOptions], list[Slice]] = lambda file, options: (
        file.whole()
    )
    """Function that cuts a file into slices, in order, that can be read
    independently."""
    samples: Callable[[Slice, SourceOptions], Iterator[str | Reject]]
    """Function that yields the samples that begin in a slice, and rejects. The file may
    be hostile: it runs in a child with limits and may raise anything;
    ``UnusableFileError`` if nothing of the file can be used."""
    example: str
