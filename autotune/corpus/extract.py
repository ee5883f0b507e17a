"""Extraction of a partition to pieces.

A process reads its slices in bounded children, small slices together. It imports the
libraries for reading once, so that children start quickly.

The process reads requests as JSON lines from standard input, and writes ``{"ready":
true}`` and then an answer per request to standard output. An answer is
``{"outcomes"}``, one for each slice from the first to the last that was read; the
fields of ``Unread`` if the child did not finish; or ``{"errno"}`` if the disk is full.
When standard input closes, it kills its child and exits.
"""

import contextlib
import functools
import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from autotune.corpus import bounded
from autotune.corpus.bounded import (
    CancelledError,
    ChildLimits,
    Extracted,
    Outcome,
    Unread,
    outcome_of,
    reason_of,
)
from autotune.corpus.pieces import (
    INDEX,
    PiecePaths,
    PieceWriter,
    digest,
    file_sizes,
    take_back,
)
from autotune.corpus.sources import SOURCES
from autotune.corpus.sources.base import (
    Partition,
    Reject,
    Slice,
    SourceOptions,
    UnusableFileError,
)
from autotune.corpus.workplace import Receipt, Workplace
from autotune.errors import InternalError, MachineLacks

REJECTS_FILE = "rejects"
MAX_LISTED_REJECTS = 100_000
"""Rejects to list per slice; of further ones, only their number."""
_REQUEST_FD = 0
_LEAST_BYTES_PER_S = 2**20
"""Slowest speed to read a slice at: its time limit is ``MAX_WALL_S`` plus the time for
its bytes at this speed."""
_STOP_S = 5.0
_TOGETHER_BYTES = 2**20
_TOGETHER = 128
"""Maximum number of slices per child; if one makes it fail, the others are read
again."""
# The child imports from the same paths as this process: neither the working directory
# nor the environment can shadow a module (-P), and a checkout that is not installed
# works too.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from"
    " autotune.corpus.extract import main; main()"
)


def extract_partition(
    workplace: Workplace,
    directory: Path,
    *,
    partition: Partition,
    options: SourceOptions,
    most: int | None = None,
) -> Receipt:
    """Write a partition's samples as pieces, and its rejects as JSON lines.

    With ``most``, stop at that many distinct samples; duplicates are written too.

    Returns:
        ``samples`` and ``text_bytes`` of each piece, the number of ``files`` whose
        first slice was read, ``raw_bytes`` of the slices that were read, and the number
        of ``rejected`` files, lines and rows.

    Raises:
        MachineLacks: If the extraction process cannot start.
        OSError: If the directory cannot be written, as when the disk is full.
    """
    files = raw_bytes = rejected = piece = 0
    seen: set[bytes] = set()
    (directory / REJECTS_FILE).touch()
    told = {
        "kind": partition.kind,
        "options": asdict(options),
        "directory": str(directory),
        "most": most,
    }
    with contextlib.closing(_Process()) as process:
        for slices in _read_together(partition.slices):
            for part, outcome in _read(process, told | {"piece": piece}, slices):
                if isinstance(outcome, Unread):
                    rejected += 1
                    continue
                files += part.begin == 0
                raw_bytes += part.end - part.begin
                rejected += outcome.rejected
                if most is not None:
                    # The last digests of the pieces that the slice went to.
                    pieces = [
                        PiecePaths(directory=directory, number=n)
                        for n in range(piece, outcome.piece + 1)
                    ]
                    digests = [
                        record.tobytes()
                        for paths in pieces
                        for record in paths.read_index()["digest"]
                    ]
                    seen.update(digests[len(digests) - outcome.samples :])
                piece = outcome.piece
            if most is not None and len(seen) >= most:
                break
    pieces = [
        PiecePaths(directory=directory, number=number) for number in range(piece + 1)
    ]
    # None if no slice could be read.
    pieces = [paths for paths in pieces if paths.file("index").exists()]
    for paths in pieces:
        paths.sort_digests()
    return {
        "samples": [
            paths.file("index").stat().st_size // INDEX.itemsize for paths in pieces
        ],
        "text_bytes": [paths.file("text").stat().st_size for paths in pieces],
        "files": files,
        "raw_bytes": raw_bytes,
        "rejected": rejected,
    }


class _Process:
    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        # Its children inherit the other end, which closes when the last of them has
        # ended.
        read_fd, inherited_fd = os.pipe()
        self._alive = os.fdopen(read_fd)
        try:
            # Its own session: Ctrl-C reaches the requesting process only, which
            # then stops this one.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(inherited_fd,),
                start_new_session=True,
            )
        except OSError as error:
            self._alive.close()
            what = f"cannot start an extraction process: {error.strerror}"
            raise MachineLacks(
                what, next_step="Use fewer --workers, or stop other programs."
            ) from error
        finally:
            os.close(inherited_fd)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        if b"ready" not in self._replies.readline():
            self.close()
            what = "did not start; see its message above"
            next_step = (
                "Reinstall this package, in its checkout: python -m pip install"
                " --force-reinstall -e ."
            )
            if self._process.returncode < 0:
                what = f"was killed by signal {-self._process.returncode} at start-up"
                next_step = (
                    "If memory is short, use fewer --workers. Run the same command"
                    " again to resume."
                )
            raise MachineLacks(f"the extraction process {what}", next_step=next_step)

    def extract(self, request: Mapping[str, Any]) -> Sequence[Outcome] | Unread:
        """Send a request for ``extract_slices`` to the process.

        If the process dies, it is replaced.

        Returns:
            The outcomes, or ``Unread`` if the process died.
        """
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        line = self._replies.readline()
        if not line.endswith(b"\n"):
            self.close()
            self._start()
            return Unread(reason="its extraction process died", killed=True)
        reply = json.loads(line)
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]))
        return (
            [outcome_of(one) for one in reply["outcomes"]]
            if "outcomes" in reply
            else Unread(**reply)
        )

    def close(self) -> None:
        """End the process and its child; nothing is written after that."""
        if self._alive.closed:
            return
        try:
            # Closes standard input, which ends the process.
            self._process.communicate(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        with self._alive:
            gone, _, _ = select.select([self._alive], [], [], _STOP_S)
        if not gone:
            raise InternalError(
                "a reader outlived its extraction process",
                next_step="Run the same command again.",
            )


def _read_together(slices: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    """Yield runs of slices to read in one child.

    A fork takes as long as reading many small files.
    """
    first = size_bytes = 0
    for number, part in enumerate(slices):
        size_bytes += part.end - part.begin
        if number > first and (
            size_bytes > _TOGETHER_BYTES or number - first == _TOGETHER
        ):
            yield slices[first:number]
            first, size_bytes = number, part.end - part.begin
    yield slices[first:]


def _read(
    process: _Process, request: Mapping[str, Any], slices: Sequence[Slice]
) -> list[tuple[Slice, Outcome]]:
    """Read slices together, or else one by one.

    If the child was killed, they are read together once more first. Slices after the
    last needed one are skipped.
    """
    directory = Path(request["directory"])
    before = file_sizes(directory)
    told = {**request, "slices": [asdict(part) for part in slices]}
    outcome = process.extract(told)
    if isinstance(outcome, Unread):
        take_back(directory, before)
        if outcome.killed:
            outcome = process.extract(told)
    if not isinstance(outcome, Unread):
        return list(zip(slices, outcome, strict=False))
    take_back(directory, before)
    if len(slices) == 1:
        note_unread(directory, slices[0], outcome)
        return [(slices[0], outcome)]
    read: list[tuple[Slice, Outcome]] = []
    for part in slices:
        read += _read(process, request, [part])
        if isinstance(last := read[-1][1], Extracted):
            request = {**request, "piece": last.piece}
    return read


def main() -> None:
    """Serve requests until standard input closes."""
    _answer({"ready": True})
    for line in _requests():
        request = json.loads(line)
        for library in SOURCES[request["kind"]].libraries:
            importlib.import_module(library)
        size_bytes = sum(part["end"] - part["begin"] for part in request["slices"])
        limits = ChildLimits(
            wall_s=bounded.MAX_WALL_S + size_bytes / _LEAST_BYTES_PER_S
        )
        try:
            outcome = bounded.run_bounded(
                functools.partial(extract_slices, request),
                limits,
                cancel_fd=_REQUEST_FD,
            )
        except CancelledError:
            return
        except OSError as error:
            _answer({"errno": error.errno})
            continue
        _answer(
            asdict(outcome)
            if isinstance(outcome, Unread)
            else {"outcomes": [asdict(one) for one in outcome]}
        )


def extract_slices(request: dict[str, Any]) -> list[Outcome]:
    """Append the samples of slices to pieces, and rejects to the list of rejects.

    Args:
        request: ``kind``, ``slices``, ``options``, ``directory``, ``piece`` (the number
            to continue with), and ``most`` (distinct samples to stop at, or None).

    Returns:
        The outcome of each slice up to the last that was needed. No samples are left of
        an unread slice.

    Raises:
        MemoryError: If memory is short.
        OSError: If the disk is full.
    """
    directory, piece = Path(request["directory"]), request["piece"]
    outcomes: list[Outcome] = []
    seen: set[bytes] = set()
    for fields in request["slices"]:
        before = file_sizes(directory)
        try:
            done, new = _extract_slice(request, Slice(**fields), piece, seen)
        # A hostile file can make a parser raise anything; only this slice is lost.
        except Exception as error:
            if isinstance(error, MemoryError) or (
                isinstance(error, OSError) and error.errno in bounded.DISK_FULL
            ):
                raise
            take_back(directory, before)
            refused = Unread(reason=reason_of(error))
            note_unread(directory, Slice(**fields), refused)
            outcomes.append(refused)
            continue
        outcomes.append(done)
        piece = done.piece
        seen |= new
        if request["most"] is not None and len(seen) >= request["most"]:
            break
    return outcomes


def note_unread(directory: Path, part: Slice, refused: Unread) -> None:
    """Add an unread slice to the list of rejects."""
    where = ""
    with contextlib.suppress(OSError):  # removed since it was found
        if part.begin or part.end < Path(part.path).stat().st_size:
            where = f"bytes {part.begin} to {part.end}"
    with (directory / REJECTS_FILE).open("a") as rejects:
        _list(rejects, Reject(path=part.path, where=where, reason=refused.reason))


def _extract_slice(
    request: dict[str, Any], part: Slice, piece: int, seen: set[bytes]
) -> tuple[Extracted, set[bytes]]:
    """Extract one slice.

    Returns:
        The outcome, and the slice's digests that are not in ``seen`` if ``most`` is
        set.
    """
    source, directory, most = (
        SOURCES[request["kind"]],
        Path(request["directory"]),
        request["most"],
    )
    new: set[bytes] = set()
    samples = rejected = 0
    with (
        contextlib.closing(PieceWriter(directory, piece)) as pieces,
        (directory / REJECTS_FILE).open("a") as rejects,
    ):
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
            more = (
                f"{rejected - MAX_LISTED_REJECTS} more between bytes {part.begin} and"
                f" {part.end} are not listed"
            )
            _list(rejects, Reject(path=part.path, where="", reason=more))
        if not samples and not rejected and source.kind == "elf":
            raise UnusableFileError("contains no function of two or more instructions")
        return Extracted(samples=samples, piece=pieces.number, rejected=rejected), new


def _list(rejects: TextIO, reject: Reject) -> None:
    rejects.write(json.dumps(asdict(reject)) + "\n")


def _requests() -> Iterator[bytes]:
    """Yield lines of standard input, read without a buffer.

    ``run_bounded`` watches the same descriptor for its end.
    """
    pending = b""
    while chunk := os.read(_REQUEST_FD, 2**16):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines


def _answer(value: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)  # the requesting process has ended
