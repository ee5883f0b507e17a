"""Several extraction processes at once; their results in the order of the files, whoever finishes first."""

import contextlib
import json
import select
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.corpus.bounded import Extracted, Refused
from autotune.errors import MachineLacks

# How far past the slowest file the others may run: their output waits on disk meanwhile.
_AHEAD_PER_WORKER = 8
_STOP_S = 5.0
# The child imports from exactly where this process does: neither the working directory nor the environment can put
# another module in its way (-P), and a checkout that is not installed works too.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from autotune.corpus.worker import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileResult:
    """What became of one file; ``spool`` holds its functions, one a line, when they were extracted."""

    index: int
    outcome: Extracted | Refused
    spool: Path


class _Worker:
    """One extraction process and the file it is busy with."""

    def __init__(self) -> None:
        self.busy_with: int | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Ctrl-C reaches this process alone, which then stops the others in order.
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
                next_step="Install again: pip install --force-reinstall 'encoder-autotune[elf]'",
            )

    def fileno(self) -> int:
        """For ``select``: readable when an answer, or the process's end, has arrived."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self, index: int, path: Path, spool: Path, most: int | None) -> None:
        """Give it a file; a process that has died answers by its end."""
        assert self._process.stdin is not None
        self.busy_with = index
        request = {"path": str(path), "spool": str(spool), "most": most}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> Extracted | Refused | None:
        """Read the answer; None when the process has died instead."""
        self.busy_with = None
        line = self._read()
        if not line:
            return None
        reply = json.loads(line)
        return Refused(**reply) if "reason" in reply else Extracted(**reply)

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close_requests(self) -> None:
        """Ask it to kill its child and end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def stop(self) -> None:
        """End it, and its child with it."""
        self.close_requests()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def extract_in_order(
    files: Sequence[Path], *, workers: int, most: int | None, spool_dir: Path
) -> Generator[FileResult, None, None]:
    """Yield one result per file, in the order given. Close the iterator to stop early.

    Args:
        files: ELF files.
        workers: Processes at once.
        most: Functions to take from one file at most.
        spool_dir: An empty directory; the consumer removes each spool file when it is done with it.

    Raises:
        MachineLacks: If an extraction process cannot start.
    """
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(files))):
            pool.append(_Worker())  # one by one: those that started are stopped if a later one fails
        yield from _deal(pool, files, most, spool_dir)
    finally:
        for worker in pool:
            worker.close_requests()
        for worker in pool:
            worker.stop()


def _deal(
    pool: list[_Worker], files: Sequence[Path], most: int | None, spool_dir: Path
) -> Generator[FileResult, None, None]:
    waiting = deque(enumerate(files))
    finished: dict[int, FileResult] = {}
    for turn in range(len(files)):
        while turn not in finished:
            _hand_out(pool, waiting, turn + _AHEAD_PER_WORKER * len(pool), most, spool_dir)
            result = _next_result(pool, spool_dir)
            finished[result.index] = result
        yield finished.pop(turn)


def _hand_out(
    pool: list[_Worker], waiting: deque[tuple[int, Path]], before: int, most: int | None, spool_dir: Path
) -> None:
    for worker in pool:
        if worker.busy_with is None and waiting and waiting[0][0] < before:
            index, path = waiting.popleft()
            worker.ask(index, path, spool_dir / f"{index}.txt", most)


def _next_result(pool: list[_Worker], spool_dir: Path) -> FileResult:
    """Wait for any answer; a process that has died is replaced, and its file refused."""
    readable, _, _ = select.select([worker for worker in pool if worker.busy_with is not None], [], [])
    worker: _Worker = readable[0]
    index = worker.busy_with
    assert index is not None
    outcome = worker.answer()
    if outcome is None:
        worker.stop()
        pool[pool.index(worker)] = _Worker()
        outcome = Refused(reason="its extraction process died")
    return FileResult(index=index, outcome=outcome, spool=spool_dir / f"{index}.txt")
