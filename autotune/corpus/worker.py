"""The process that forks one bounded child per file. It loads the disassembler once, so a child starts in milliseconds.

Speaks JSON lines: on standard input one request at a time, ``{"path", "spool", "most"}``; on standard output
``{"ready": true}`` at first, then one answer per request: ``{"functions", "duplicates"}`` or ``{"reason"}``. When
standard input closes, it kills its child and ends.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from autotune.corpus import elf
from autotune.corpus.bounded import CancelledError, Extracted, Limits, run_bounded

_REQUEST_FD = 0


def main() -> None:
    """Serve requests until standard input closes."""
    _answer({"ready": True})
    for line in _requests():
        request = json.loads(line)
        path, spool, most = Path(request["path"]), Path(request["spool"]), request["most"]
        work = functools.partial(spool_functions, path, spool, most)
        try:
            outcome = run_bounded(work, Limits(), cancel_fd=_REQUEST_FD)
        except CancelledError:
            return
        _answer(dataclasses.asdict(outcome))


def spool_functions(path: Path, spool: Path, most: int | None) -> Extracted:
    """Write a file's distinct functions, one a line, and stop at ``most`` of them.

    Raises:
        UnusableFileError: If the file is no program, or holds no function.
    """
    seen: set[bytes] = set()
    duplicates = 0
    with spool.open("x", encoding="ascii") as file:
        for text in elf.functions(path):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in seen:
                duplicates += 1
                continue
            seen.add(digest)
            file.write(text + "\n")
            if len(seen) == most:
                break
    if not seen:
        raise elf.UnusableFileError("holds no function of two or more instructions")
    return Extracted(functions=len(seen), duplicates=duplicates)


def _requests() -> Iterator[bytes]:
    """Lines of standard input, read without a buffer: ``run_bounded`` watches the same descriptor for its end."""
    pending = b""
    while chunk := os.read(_REQUEST_FD, 2**16):
        pending += chunk
        *lines, pending = pending.split(b"\n")
        yield from lines


def _answer(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
