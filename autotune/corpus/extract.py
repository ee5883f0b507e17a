"""One partition to pieces: an extraction process reads its slices, each in a bounded child."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.corpus.bounded import Extracted, Refused
from autotune.corpus.pieces import INDEX, PiecePaths, read_index
from autotune.corpus.sources.base import Partition, Reject, Slice, SourceOptions
from autotune.corpus.worker import REJECTS_FILE
from autotune.errors import MachineLacks

_STOP_S = 5.0
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
    with _extraction_process() as process:
        for part in partition.slices:
            before = _sizes(directory)
            outcome = process.extract(partition.kind, part, options, directory=directory, piece=piece, most=most)
            if isinstance(outcome, Refused):
                _undo(directory, before)
                _write_reject(directory, Reject(path=part.path, where=_where(part), reason=outcome.reason))
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
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Ctrl-C reaches the one who asks, who then stops this one in order.
                start_new_session=True,
            )
        except OSError as error:
            raise MachineLacks(
                f"cannot start an extraction process: {error.strerror}",
                next_step="Use fewer --workers, or end other programs.",
            ) from error
        if b"ready" not in self._read():
            self.stop()
            raise MachineLacks(
                "the extraction process did not start; its message is above",
                next_step="Install again: pip install --force-reinstall encoder-autotune",
            )

    def extract(
        self, kind: str, part: Slice, options: SourceOptions, *, directory: Path, piece: int, most: int | None
    ) -> Extracted | Refused:
        """Extract one slice; a process that dies of it is a refusal, and replaced.

        Raises:
            OSError: If the disk is full.
        """
        request = {
            "kind": kind,
            "slice": dataclasses.asdict(part),
            "options": dataclasses.asdict(options),
            "directory": str(directory),
            "piece": piece,
            "most": most,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        line = self._read()
        if not line:
            self.stop()
            self._start()
            return Refused(reason="its extraction process died")
        reply = json.loads(line)
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]))
        return Refused(**reply) if "reason" in reply else Extracted(**reply)

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def stop(self) -> None:
        """End it, and its child with it."""
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


@contextlib.contextmanager
def _extraction_process() -> Iterator[_Process]:
    process = _Process()
    try:
        yield process
    finally:
        process.stop()


def _sizes(directory: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_size for entry in os.scandir(directory)}


def _undo(directory: Path, sizes: dict[str, int]) -> None:
    """Take back what a child wrote that did not come to its end."""
    for path in directory.iterdir():
        if path.name in sizes:
            os.truncate(path, sizes[path.name])
        else:
            path.unlink()


def _where(part: Slice) -> str:
    whole = part.begin == 0 and part.end >= Path(part.path).stat().st_size
    return "" if whole else f"bytes {part.begin} to {part.end}"


def _write_reject(directory: Path, reject: Reject) -> None:
    with (directory / REJECTS_FILE).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(reject)) + "\n")


def _new_digests(directory: Path, first_piece: int, outcome: Extracted) -> list[bytes]:
    """The digests of the samples that one slice added, over the pieces that it went to."""
    numbers = range(first_piece, outcome.piece + 1)
    records = [record for number in numbers for record in read_index(PiecePaths.of(directory, number))["digest"]]
    return [record.tobytes() for record in records[len(records) - outcome.samples :]]
