"""The process that forks a bounded child to read slices. It loads what reading needs once: a child starts at once.

Speaks JSON lines: on standard input one request at a time; on standard output ``{"ready": true}`` at first, then one
answer per request: ``{"outcomes"}``, one for each slice from the first to the last that was read, or the fields of
``Refused`` when the child did not come to its end, or ``{"errno"}`` when the disk is full. When standard input closes,
it kills its child and ends.
"""

import dataclasses
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from autotune.corpus.bounded import (
    DISK_FULL,
    MAX_WALL_S,
    CancelledError,
    Extracted,
    Limits,
    Outcome,
    Refused,
    reason_of,
    run_bounded,
)
from autotune.corpus.pieces import PieceWriter, digest, file_sizes, take_back
from autotune.corpus.sources import SOURCES
from autotune.corpus.sources.base import Reject, Slice, SourceOptions, UnusableFileError

_REQUEST_FD = 0
REJECTS_FILE = "rejects"
MAX_LISTED_REJECTS = 100_000
"""Of one slice; more are counted, and the list ends with how many. A file of another kind would be repeated in it."""
_LEAST_BYTES_PER_S = 2**20
"""A slice that is read more slowly is given up."""


def main() -> None:
    """Serve requests until standard input closes."""
    _answer({"ready": True})
    for line in _requests():
        request = json.loads(line)
        for library in SOURCES[request["kind"]].libraries:
            importlib.import_module(library)
        size_bytes = sum(part["end"] - part["begin"] for part in request["slices"])
        limits = Limits(wall_s=MAX_WALL_S + size_bytes / _LEAST_BYTES_PER_S)
        try:
            outcome = run_bounded(functools.partial(extract_slices, request), limits, cancel_fd=_REQUEST_FD)
        except CancelledError:
            return
        except OSError as error:
            _answer({"errno": error.errno})
            continue
        if isinstance(outcome, Refused):
            _answer(dataclasses.asdict(outcome))
        else:
            _answer({"outcomes": [dataclasses.asdict(one) for one in outcome]})


def extract_slices(request: dict[str, Any]) -> list[Outcome]:
    """Append the samples of slices to pieces, and what could not be used to the list of rejects.

    Args:
        request: ``kind``, ``slices``, ``options``, ``directory``, ``piece`` (the number to go on with), and ``most``:
            distinct samples to stop at, or None. Samples that repeat are written too.

    Returns:
        What became of each slice; of those behind the last that was needed nothing. Nothing is left of a refused one.

    Raises:
        MemoryError: If a slice needs more than there is.
        OSError: If the disk is full.
    """
    directory, piece = Path(request["directory"]), request["piece"]
    outcomes: list[Outcome] = []
    seen: set[bytes] = set()
    for fields in request["slices"]:
        before = file_sizes(directory)
        try:
            done, new = _extract_slice(request, Slice(**fields), piece, seen)
        except MemoryError:
            raise
        except Exception as error:  # a hostile file can make a parser raise anything; it costs this slice
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            take_back(directory, before)
            refused = Refused(reason=reason_of(error))
            note_refused(directory, Slice(**fields), refused)
            outcomes.append(refused)
            continue
        outcomes.append(done)
        piece = done.piece
        seen |= new
        if request["most"] is not None and len(seen) >= request["most"]:
            break
    return outcomes


def note_refused(directory: Path, part: Slice, refused: Refused) -> None:
    """List a slice among what could not be used."""
    try:
        whole = part.begin == 0 and part.end >= Path(part.path).stat().st_size
    except OSError:  # gone since it was found
        whole = True
    where = "" if whole else f"bytes {part.begin} to {part.end}"
    with (directory / REJECTS_FILE).open("a") as rejects:
        _list(rejects, Reject(path=part.path, where=where, reason=refused.reason))


def _extract_slice(request: dict[str, Any], part: Slice, piece: int, seen: set[bytes]) -> tuple[Extracted, set[bytes]]:
    """Also returns the digests that had not been seen, where they are counted."""
    source, directory, most = SOURCES[request["kind"]], Path(request["directory"]), request["most"]
    new: set[bytes] = set()
    samples = rejected = 0
    with PieceWriter(directory, piece) as pieces, (directory / REJECTS_FILE).open("a") as rejects:
        for found in source.samples(part, SourceOptions(**request["options"])):
            if isinstance(found, Reject):
                rejected += 1
                if rejected <= MAX_LISTED_REJECTS:
                    _list(rejects, found)
                continue
            content = found.encode()
            name = digest(content)
            pieces.add(content, name)
            samples += 1
            if most is not None and name not in seen:
                new.add(name)
                if len(seen) + len(new) == most:
                    break
        if rejected > MAX_LISTED_REJECTS:
            more = f"{rejected - MAX_LISTED_REJECTS} more between bytes {part.begin} and {part.end} are not listed"
            _list(rejects, Reject(path=part.path, where="", reason=more))
        if not samples and not rejected and source.kind == "elf":
            raise UnusableFileError("holds no function of two or more instructions")
        return Extracted(samples=samples, piece=pieces.number, rejected=rejected), new


def _list(rejects: TextIO, reject: Reject) -> None:
    rejects.write(json.dumps(dataclasses.asdict(reject)) + "\n")


def _requests() -> Iterator[bytes]:
    """Lines of standard input, read without a buffer: ``run_bounded`` watches the same descriptor for its end."""
    pending = b""
    while chunk := os.read(_REQUEST_FD, 2**16):
        pending += chunk
        *lines, pending = pending.split(b"\n")
        yield from lines


def _answer(value: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)  # nobody waits for it any more


if __name__ == "__main__":
    main()
