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
"""Name of a partition's list of rejects."""
MAX_LISTED_REJECTS = 100_000
"""Rejects to list per slice; of further ones, only their number."""
_REQUEST_FD = 0
"""Descriptor of standard input."""
_LEAST_BYTES_PER_S = 2**20
"""Slowest speed to read a slice at: its time limit is ``MAX_WALL_S`` plus the time for
its bytes at this speed."""
_STOP_S = 5.0
"""Longest wait for the process to end, in seconds."""
_TOGETHER_BYTES = 2**20
"""Size of the slices that one child reads."""
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
    files = 0
    raw_bytes = 0
    rejected = 0
    piece = 0
    distinct: set[bytes] = set()
    (directory / REJECTS_FILE).touch()
    request = {
        "kind": partition.kind,
        "options": asdict(options),
        "directory": str(directory),
        "most": most,
    }
    with contextlib.closing(_Process()) as process:
        for slices in _read_together(partition.slices):
            for part, outcome in _read(process, request | {"piece": piece}, slices):
                if isinstance(outcome, Unread):
                    rejected += 1
                    continue
                if part.begin == 0:
                    files += 1
                raw_bytes += part.end - part.begin
                rejected += outcome.rejected
                if most is not None:
                    distinct |= _digests_of_slice(directory, piece, outcome)
                piece = outcome.piece
            if most is not None and len(distinct) >= most:
                break
    return {
        **_sort_pieces(directory, piece),
        "files": files,
        "raw_bytes": raw_bytes,
        "rejected": rejected,
    }


def _digests_of_slice(
    directory: Path, first_piece: int, outcome: Extracted
) -> set[bytes]:
    """Return the digests of a slice: the last ones of the pieces that it went to."""
    digests: list[bytes] = []
    for number in range(first_piece, outcome.piece + 1):
        paths = PiecePaths(directory=directory, number=number)
        digests += [record.tobytes() for record in paths.read_index()["digest"]]
    return set(digests[len(digests) - outcome.samples :])


def _sort_pieces(directory: Path, last_piece: int) -> Receipt:
    """Sort the digests of all pieces; return their samples and bytes of text.

    There are no pieces if no slice could be read.
    """
    samples = []
    text_bytes = []
    for number in range(last_piece + 1):
        paths = PiecePaths(directory=directory, number=number)
        if not paths.file("index").exists():
            continue
        paths.sort_digests()
        samples.append(paths.file("index").stat().st_size // INDEX.itemsize)
        text_bytes.append(paths.file("text").stat().st_size)
    return {"samples": samples, "text_bytes": text_bytes}


class _Process:
    """Process that reads slices in children; see the module's docstring."""

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
            raise MachineLacks(
                f"cannot start an extraction process: {error.strerror}",
                next_step="Use fewer --workers, or stop other programs.",
            ) from error
        finally:
            os.close(inherited_fd)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        self._replies = self._process.stdout
        if b"ready" not in self._replies.readline():
            self.close()
            raise _start_error(self._process.returncode)

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
        if "outcomes" in reply:
            return [outcome_of(outcome) for outcome in reply["outcomes"]]
        return Unread(**reply)

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
            ended, _, _ = select.select([self._alive], [], [], _STOP_S)
        if not ended:
            raise InternalError(
                "a reader outlived its extraction process",
                next_step="Run the same command again.",
            )


def _start_error(returncode: int) -> MachineLacks:
    """Return the error for a process that ended before it was ready."""
    if returncode < 0:
        return MachineLacks(
            f"the extraction process was killed by signal {-returncode} at start-up",
            next_step=(
                "If memory is short, use fewer --workers. Run the same command again to"
                " resume."
            ),
        )
    return MachineLacks(
        "the extraction process did not start; see its message above",
        next_step=(
            "Reinstall this package, in its checkout: python -m pip install"
            " --force-reinstall -e ."
        ),
    )


def _read_together(slices: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    """Yield runs of slices to read in one child.

    A fork takes as long as reading many small files.
    """
    first = 0
    size_bytes = 0
    for number, part in enumerate(slices):
        part_bytes = part.end - part.begin
        size_bytes += part_bytes
        is_full = size_bytes > _TOGETHER_BYTES or number - first == _TOGETHER
        if number > first and is_full:
            yield slices[first:number]
            first = number
            size_bytes = part_bytes
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
    request_together = {**request, "slices": [asdict(part) for part in slices]}
    outcomes = process.extract(request_together)
    if isinstance(outcomes, Unread):
        take_back(directory, before)
        if outcomes.killed:
            outcomes = process.extract(request_together)
    if not isinstance(outcomes, Unread):
        return list(zip(slices, outcomes, strict=False))
    take_back(directory, before)
    if len(slices) == 1:
        note_unread(directory, slices[0], outcomes)
        return [(slices[0], outcomes)]
    results: list[tuple[Slice, Outcome]] = []
    for part in slices:
        results += _read(process, request, [part])
        _, last_outcome = results[-1]
        if isinstance(last_outcome, Extracted):
            # The next slice continues with the piece that this one ended in.
            request = {**request, "piece": last_outcome.piece}
    return results


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
            outcomes = bounded.run_bounded(
                functools.partial(extract_slices, request),
                limits,
                cancel_fd=_REQUEST_FD,
            )
        except CancelledError:
            return
        except OSError as error:
            _answer({"errno": error.errno})
            continue
        if isinstance(outcomes, Unread):
            _answer(asdict(outcomes))
        else:
            _answer({"outcomes": [asdict(outcome) for outcome in outcomes]})


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
    directory = Path(request["directory"])
    piece = request["piece"]
    outcomes: list[Outcome] = []
    distinct: set[bytes] = set()
    for fields in request["slices"]:
        part = Slice(**fields)
        before = file_sizes(directory)
        try:
            extracted, new = _extract_slice(request, part, piece, distinct)
        # A hostile file can make a parser raise anything; only this slice is lost.
        except Exception as error:
            is_disk_full = (
                isinstance(error, OSError) and error.errno in bounded.DISK_FULL
            )
            if is_disk_full or isinstance(error, MemoryError):
                raise
            take_back(directory, before)
            unread = Unread(reason=reason_of(error))
            note_unread(directory, part, unread)
            outcomes.append(unread)
            continue
        outcomes.append(extracted)
        piece = extracted.piece
        distinct |= new
        if request["most"] is not None and len(distinct) >= request["most"]:
            break
    return outcomes


def note_unread(directory: Path, part: Slice, unread: Unread) -> None:
    """Add an unread slice to the list of rejects."""
    where = ""
    with contextlib.suppress(OSError):  # removed since it was found
        if part.begin or part.end < Path(part.path).stat().st_size:
            where = f"bytes {part.begin} to {part.end}"
    with (directory / REJECTS_FILE).open("a") as rejects:
        _list(rejects, Reject(path=part.path, where=where, reason=unread.reason))


def _extract_slice(
    request: dict[str, Any], part: Slice, piece: int, distinct: set[bytes]
) -> tuple[Extracted, set[bytes]]:
    """Extract one slice.

    Returns:
        The outcome, and the slice's digests that are not in ``distinct`` if ``most`` is
        set.

    Raises:
        UnusableFileError: If the slice is unusable. A hostile file may raise anything.
    """
    source = SOURCES[request["kind"]]
    directory = Path(request["directory"])
    most = request["most"]
    new: set[bytes] = set()
    samples = 0
    rejected = 0
    with (
        contextlib.closing(PieceWriter(directory, piece)) as pieces,
        (directory / REJECTS_FILE).open("a") as rejects,
    ):
        for sample in source.samples(part, SourceOptions(**request["options"])):
            if isinstance(sample, Reject):
                rejected += 1
                if rejected <= MAX_LISTED_REJECTS:
                    _list(rejects, sample)
                continue
            content = sample.encode()
            sample_digest = digest(content)
            pieces.add(content, sample_digest)
            samples += 1
            if most is not None and sample_digest not in distinct:
                new.add(sample_digest)
                if len(distinct) + len(new) == most:
                    break
        if rejected > MAX_LISTED_REJECTS:
            reason = (
                f"{rejected - MAX_LISTED_REJECTS} more between bytes {part.begin} and"
                f" {part.end} are not listed"
            )
            _list(rejects, Reject(path=part.path, where="", reason=reason))
        if not samples and not rejected and source.kind == "elf":
            raise UnusableFileError("contains no function of two or more instructions")
        return Extracted(samples=samples, piece=pieces.number, rejected=rejected), new


def _list(rejects: TextIO, reject: Reject) -> None:
    """Add a reject to the list of rejects."""
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
    """Write an answer as a line of standard output."""
    try:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(0)  # the requesting process has ended
