"""What sources have in common: the values that they give, and what each has to do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SLICE_BYTES = 32 * 2**20
"""Large files that can be cut are cut to this, so that many processes share one, and a lost piece costs little."""
MAX_SAMPLE_BYTES = 8 * 2**20
"""Longer samples are rejected: one must never decide how much memory is needed."""
TOO_LONG = f"longer than {MAX_SAMPLE_BYTES // 2**20} MiB"


class UnusableFileError(Exception):
    """Nothing of the file can be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a file: bytes ``begin`` to ``end``; the whole file if its kind cannot be cut."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """What one task reads: slices in reading order, all of one kind."""

    kind: str
    slices: tuple[Slice, ...]

    @property
    def raw_bytes(self) -> int:
        """Size of the slices."""
        return sum(part.end - part.begin for part in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """Something that was looked at and left out. ``where`` is empty for a whole file."""

    path: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file to read."""

    path: Path
    size_bytes: int
    modified_ns: int

    def whole(self) -> list[Slice]:
        """Return the file as one slice."""
        return [Slice(path=str(self.path), begin=0, end=self.size_bytes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How files are read."""

    field: str = "text"
    """Of jsonl and parquet: what holds the text; dots lead into nested objects of jsonl."""
    unit: Literal["line", "paragraph", "file"] = "line"
    """Of text: what one sample is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSource:
    """One kind of raw data."""

    kind: str
    libraries: tuple[str, ...] = ()
    """Modules that reading needs and that a plain installation lacks."""
    takes: Callable[[Path, bool], bool]
    """Whether a file is of this kind; with True, the user named it, or a pattern that it matches."""
    cut: Callable[[SourceFile, SourceOptions], list[Slice]] = lambda file, options: file.whole()
    """Slices of a file that may be read apart, in order."""
    samples: Callable[[Slice, SourceOptions], Iterator[str | Reject]]
    """Yields the samples that begin in a slice, and what could not be used. The file may be hostile: this runs in a
    child with limits, and may raise anything; ``UnusableFileError`` if nothing of the file can be used."""
    example: str
    """A specification, for messages."""
