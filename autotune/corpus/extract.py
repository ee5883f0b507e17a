"""One partition to pieces: an extraction process reads its slices in bounded children, small ones together."""

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.corpus.bounded import Extracted, Outcome, Refused, outcome_of
from autotune.corpus.pieces import INDEX, PiecePaths, file_sizes, read_index, take_back
from autotune.corpus.sources.base import Partition, Slice, SourceOptions
from autotune.corpus.worker import REJECTS_FILE, note_refused
from autotune.errors import InternalError, MachineLacks

_STOP_S = 5.0
_TOGETHER_BYTES = 2**20
_TOGETHER = 128
"""Slices that share a child at most: what one of them costs when it fails is that the others are read again."""
# The child imports from exactly where this process does: neither the working directory nor the environment can put
# another module in its way (-P), and a checkout that is not installed works too.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from autotune.corpus.worker import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionResult:
    """What became of a partition.

    Args:
        samples: Of each piece.
        text_bytes: Of each piece.
        files: Files of which the first slice was read.
        raw_bytes: Size of the slices that were read.
        rejected: What could not be used: files, lines, rows.
    """

    samples: list[int]
    text_bytes: list[int]
    files: int
    raw_bytes: int
    rejected: int


def extract_partition(
    partition: Partition, options: SourceOptions, directory: Path, *, most: int | None = None
) -> PartitionResult:
    """Write a partition's samples as pieces into an empty directory, and what could not be used as JSON lines.

    Args:
        partition: What to read.
        options: How to read it.
        directory: Where to.
        most: Stop when there are that many distinct samples; others are written too.

    Raises:
        MachineLacks: If the extraction process cannot start.
        OSError: If the directory cannot be written, as when the disk is full.
    """
    files = raw_bytes = rejected = piece = 0
    seen: set[bytes] = set()
    (directory / REJECTS_FILE).touch()
    request = {
        "kind": partition.kind,
        "options": dataclasses.asdict(options),
        "directory": str(directory),
        "most": most,
    }
    with _extraction_process() as process:
        for slices in _read_together(partition.slices):
            for part, outcome in _read(process, request | {"piece": piece}, slices):
                if isinstance(outcome, Refused):
                    rejected += 1
                    continue
                files += part.begin == 0
                raw_bytes += part.end - part.begin
                rejected += outcome.rejected
                if most is not None:
                    seen.update(_new_digests(directory, piece, outcome))
                piece = outcome.piece
            if most is not None and len(seen) >= most:
                break
    pieces = [PiecePaths.of(directory, number) for number in range(piece + 1)]
    pieces = [paths for paths in pieces if paths.index.exists()]
    return PartitionResult(
        samples=[paths.index.stat().st_size // INDEX.itemsize for paths in pieces],
        text_bytes=[paths.text.stat().st_size for paths in pieces],
        files=files,
        raw_bytes=raw_bytes,
        rejected=rejected,
    )


class _Process:
    """A running extraction process."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        # Its children inherit the other end, which closes when the last of all these is gone and writes no more.
        read_fd, inherited_fd = os.pipe()
        self._alive = os.fdopen(read_fd)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(inherited_fd,),
                # Ctrl-C reaches the one who asks, who then stops this one in order.
                start_new_session=True,
            )
        except OSError as error:
            self._alive.close()
            raise MachineLacks(
                f"cannot start an extraction process: {error.strerror}",
                next_step="Use fewer --workers, or end other programs.",
            ) from error
        finally:
            os.close(inherited_fd)
        if b"ready" not in self._read():
            self.stop()
            if self._process.returncode < 0:
                raise MachineLacks(
                    f"the extraction process was ended by signal {-self._process.returncode} as it started",
                    next_step="If memory is short, use fewer --workers. The same command goes on.",
                )
            raise MachineLacks(
                "the extraction process did not start; its message is above",
                next_step="Install again: pip install --force-reinstall encoder-autotune",
            )

    def extract(self, request: Mapping[str, Any]) -> Sequence[Outcome] | Refused:
        """Do as ``worker.extract_slices`` is told; a process that dies of it is a refusal, and replaced.

        Raises:
            OSError: If the disk is full.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._read()
        if not line.endswith(b"\n"):
            self.stop()
            self._start()
            return Refused(reason="its extraction process died", killed=True)
        reply = json.loads(line)
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]))
        return [outcome_of(one) for one in reply["outcomes"]] if "outcomes" in reply else Refused(**reply)

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def stop(self) -> None:
        """End it, and its child with it; nothing is written after that.

        Raises:
            InternalError: If something of it goes on.
        """
        if self._alive.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        with self._alive:
            gone, _, _ = select.select([self._alive], [], [], _STOP_S)
        if not gone:
            raise InternalError(
                "a reader goes on after its extraction process has ended", next_step="Run the command again."
            )


@contextlib.contextmanager
def _extraction_process() -> Iterator[_Process]:
    process = _Process()
    try:
        yield process
    finally:
        process.stop()


def _read_together(slices: Sequence[Slice]) -> Iterator[Sequence[Slice]]:
    """Runs of slices that one child is forked for: a fork takes as long as reading many small files."""
    first = size_bytes = 0
    for number, part in enumerate(slices):
        size_bytes += part.end - part.begin
        if number > first and (size_bytes > _TOGETHER_BYTES or number - first == _TOGETHER):
            yield slices[first:number]
            first, size_bytes = number, part.end - part.begin
    yield slices[first:]


def _read(process: _Process, request: Mapping[str, Any], slices: Sequence[Slice]) -> list[tuple[Slice, Outcome]]:
    """Have slices read, together and if need be one by one; those that enough was found before are left out.

    A child that was killed is tried again, as that tells nothing of the files.
    """
    directory = Path(request["directory"])
    before = file_sizes(directory)
    told = {**request, "slices": [dataclasses.asdict(part) for part in slices]}
    outcome = process.extract(told)
    if isinstance(outcome, Refused):
        take_back(directory, before)
        if outcome.killed:
            outcome = process.extract(told)
    if not isinstance(outcome, Refused):
        return list(zip(slices, outcome, strict=False))
    take_back(directory, before)
    if len(slices) == 1:
        note_refused(directory, slices[0], outcome)
        return [(slices[0], outcome)]
    read: list[tuple[Slice, Outcome]] = []
    piece = request["piece"]
    for part in slices:
        read += _read(process, {**request, "piece": piece}, [part])
        last = read[-1][1]
        piece = piece if isinstance(last, Refused) else last.piece
    return read


def _new_digests(directory: Path, first_piece: int, outcome: Extracted) -> list[bytes]:
    """The digests of the samples that one slice added, over the pieces that it went to."""
    numbers = range(first_piece, outcome.piece + 1)
    records = [record for number in numbers for record in read_index(PiecePaths.of(directory, number))["digest"]]
    return [record.tobytes() for record in records[len(records) - outcome.samples :]]
