"""All files to one text of distinct functions, in reading order, whoever finishes first."""

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from autotune.core.units import format_count
from autotune.corpus.bounded import Refused
from autotune.corpus.pool import FileResult, extract_in_order
from autotune.corpus.sources import Found, Rejected, SourceFile
from autotune.errors import BadInput

Update = Callable[[float, float | None, str], None]
"""Called with (done, total or None, note)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctText:
    """The functions of many files, each once.

    Args:
        path: A text file, one function a line.
        functions: Its lines.
        duplicates: Functions left out because they are in it already.
        files: Files read.
        raw_bytes: Size of those files, each counted whole, also the last one when a bound stopped the reading in it.
        rejected: Files that could not be used.
    """

    path: Path
    functions: int
    duplicates: int
    files: int
    raw_bytes: int
    rejected: tuple[Rejected, ...]


def gather_distinct(found: Found, *, most: int | None, workers: int, scratch: Path, update: Update) -> DistinctText:
    """Extract all files and keep the first of equal functions, until there are ``most``.

    Args:
        found: What to read.
        most: Functions to keep; None keeps all.
        workers: Extraction processes at once.
        scratch: An empty directory, for the text and for what waits to be joined to it.
        update: Told how far it is.

    Raises:
        BadInput: If no file holds a function.
        MachineLacks: If an extraction process cannot start.
    """
    path, spools = scratch / "functions.txt", scratch / "spools"
    spools.mkdir()
    paths = [file.path for file in found.files]
    results = extract_in_order(paths, workers=workers, most=most, spool_dir=spools)
    with contextlib.closing(results), path.open("xb") as text:
        gathering = _Gathering(text, most, found.unreadable)
        for result in results:
            gathering.add(found.files[result.index], result)
            note = f"{format_count(gathering.functions)} functions, {result.index + 1} of {len(paths)} files"
            if most is None:
                update(result.index + 1, len(paths), note)
            else:
                update(gathering.functions, most, note)
            if gathering.functions == most:
                break
    if gathering.functions == 0:
        first = gathering.rejected[0]
        raise BadInput(
            f"no function in {len(paths)} ELF files; the first, {str(first.path)!r}: {first.reason}",
            next_step="Name a directory of linked x86-64 programs, such as elf:/usr/bin",
        )
    return gathering.finished(path)


class _Gathering:
    """Running totals, and the hashes of what was written.

    A hash takes 16 bytes, about 100 with Python's share: the functions of one machine's programs fit easily.
    """

    def __init__(self, text: BinaryIO, most: int | None, rejected: tuple[Rejected, ...]) -> None:
        self.functions = 0
        self.rejected = list(rejected)
        self._text, self._most = text, most
        self._duplicates = self._files = self._raw_bytes = 0
        self._seen: set[bytes] = set()

    def add(self, file: SourceFile, result: FileResult) -> None:
        """Join one file's functions to the text, and remove its spool."""
        if isinstance(result.outcome, Refused):
            self.rejected.append(Rejected(path=file.path, reason=result.outcome.reason))
        else:
            self._files += 1
            self._raw_bytes += file.size_bytes
            self._duplicates += result.outcome.duplicates
            self._join(result.spool)
        result.spool.unlink(missing_ok=True)

    def _join(self, spool: Path) -> None:
        with spool.open("rb") as lines:
            for line in lines:
                if self.functions == self._most:
                    return
                digest = hashlib.blake2b(line, digest_size=16).digest()
                if digest in self._seen:
                    self._duplicates += 1
                    continue
                self._seen.add(digest)
                self.functions += 1
                self._text.write(line)

    def finished(self, path: Path) -> DistinctText:
        """The totals, for good."""
        return DistinctText(
            path=path,
            functions=self.functions,
            duplicates=self._duplicates,
            files=self._files,
            raw_bytes=self._raw_bytes,
            rejected=tuple(self.rejected),
        )
