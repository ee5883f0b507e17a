"""The process that forks one bounded child per slice. It loads what reading needs once: a child starts in milliseconds.

Speaks JSON lines: on standard input one request at a time; on standard output ``{"ready": true}`` at first, then one
answer per request: the fields of ``Extracted``, or ``{"reason"}`` for a slice that cannot be used, or ``{"errno"}``
when the disk is full. When standard input closes, it kills its child and ends.
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

from autotune.corpus.bounded import MAX_WALL_S, CancelledError, Extracted, Limits, run_bounded
from autotune.corpus.pieces import PieceWriter, digest
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
        part = Slice(**request["slice"])
        limits = Limits(wall_s=MAX_WALL_S + (part.end - part.begin) / _LEAST_BYTES_PER_S)
        try:
            outcome = run_bounded(functools.partial(extract_slice, request), limits, cancel_fd=_REQUEST_FD)
        except CancelledError:
            return
        except OSError as error:
            _answer({"errno": error.errno})
            continue
        _answer(dataclasses.asdict(outcome))


def extract_slice(request: dict[str, Any]) -> Extracted:
    """Append a slice's samples to pieces, and what could not be used to the list of rejects.

    Args:
        request: ``kind``, ``slice``, ``options``, ``directory``, ``piece`` (the number to go on with), and ``most``:
            distinct samples to stop at, or None. Samples that repeat are written too.

    Raises:
        UnusableFileError: If there is no sample in a file that should hold some.
    """
    source, part = SOURCES[request["kind"]], Slice(**request["slice"])
    directory, most = Path(request["directory"]), request["most"]
    seen: set[bytes] = set()
    samples = rejected = 0
    with PieceWriter(directory, request["piece"]) as pieces, (directory / REJECTS_FILE).open("a") as rejects:
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
            if most is not None:
                seen.add(name)
                if len(seen) == most:
                    break
        if rejected > MAX_LISTED_REJECTS:
            more = f"{rejected - MAX_LISTED_REJECTS} more between bytes {part.begin} and {part.end} are not listed"
            _list(rejects, Reject(path=part.path, where="", reason=more))
        if not samples and not rejected and source.kind == "elf":
            raise UnusableFileError("holds no function of two or more instructions")
        return Extracted(samples=samples, piece=pieces.number, rejected=rejected)


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
