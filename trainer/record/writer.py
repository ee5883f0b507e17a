"""Writer of the run record during training.

``trainer.record.run_record`` documents its files.
"""

import contextlib
import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainer.config.tables import StrictTable
from trainer.config.train_config import Logger
from trainer.errors import BadConfig
from trainer.files import LockHeld, append_whole, open_locked, write_atomically
from trainer.health.events import EventRow, new_event
from trainer.record.run_record import (
    EARLIER_DIRECTORY,
    EVALUATIONS_FILE,
    EVENTS_FILE,
    EXIT_FILE,
    LOCK_FILE,
    RUN_FILE,
    STARTUP_FILE,
    STEPS_FILE,
    EvaluationRow,
    RunExit,
    RunHeader,
    StartUp,
    StepRow,
)

Row = StepRow | EvaluationRow | EventRow
Show = Callable[[RunHeader | Row], None]
"""Callback on rank 0 that shows the run header, and then each row."""

_FILES: Mapping[type[Row], str] = {
    StepRow: STEPS_FILE,
    EvaluationRow: EVALUATIONS_FILE,
    EventRow: EVENTS_FILE,
}
_LOCK_TIMEOUT_S = 30.0
"""Longest wait for a run's lock, which DataLoader workers of a killed process hold for
a moment."""


class Board(Protocol):
    """A logger, open for one run."""

    name: Logger

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step."""

    def close(self) -> None:
        """Flush and close."""


class RunWriter:
    """Writes a run record, shows its rows, and logs their numbers to boards.

    Args:
        directory: Run directory.
        active: Whether to write, as rank 0 does; otherwise only ``finish`` has an
            effect.
        again: Whether the directory may contain a run, which is then resumed.

    Raises:
        BadConfig: If the directory contains a run that is not resumed, or if another
            process uses it.
    """

    def __init__(self, directory: Path, *, active: bool, again: bool = False) -> None:
        self.directory = directory
        self.attempt = 1
        """Number of this start of the run, counted from 1."""
        self.lock: int | None = None
        """Descriptor of the lock that keeps other processes from this run; None if the
        file system has no locks."""
        self.write_error: str | None = None
        """Reason why rows are not written yet, such as a full disk; they are retried
        with the next row."""
        self._reported_error: str | None = None
        self._active = active
        self._show: Show = lambda row: None
        self._boards: list[Board] = []
        self._unwritten: dict[str, bytes] = {}
        """Lines still to be written, by file name."""
        if active:
            self._open(again=again)

    def _open(self, *, again: bool) -> None:
        """Create and lock the directory, and move the record of the last start away."""
        if not again and (self.directory / RUN_FILE).exists():
            raise BadConfig(
                f"{self.directory} already contains a run",
                next_step="Resume it with --resume auto, or choose another --out.",
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = open_locked(
                self.directory / LOCK_FILE, _LOCK_TIMEOUT_S, needed=False
            )
        except LockHeld as error:
            raise BadConfig(
                f"another process is using {self.directory}",
                next_step="Wait until it ends, or choose another --out.",
            ) from error
        # The exit.json of a start that ended before its run.json counts as a start too.
        if any((self.directory / name).exists() for name in (RUN_FILE, EXIT_FILE)):
            self._set_earlier_aside()
            self._cut_partial_lines()

    def _set_earlier_aside(self) -> None:
        """Keep the files of the last start in ``earlier/N``, and count this one."""
        root = self.directory / EARLIER_DIRECTORY
        root.mkdir(exist_ok=True)
        numbers = [int(path.name) for path in root.iterdir() if path.name.isdecimal()]
        last_attempt = 1 + max(numbers, default=0)
        self.attempt = last_attempt + 1
        earlier = root / str(last_attempt)
        earlier.mkdir()
        # Copied, not moved, as run.json marks the directory as a run.
        partial = earlier / f".{RUN_FILE}.partial"
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(self.directory / RUN_FILE, partial)
            partial.rename(earlier / RUN_FILE)
        for name in (STARTUP_FILE, EXIT_FILE):
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).rename(earlier / name)

    def _cut_partial_lines(self) -> None:
        """Cut the ends of lines that the last start was killed while writing."""
        for name in _FILES.values():
            with contextlib.suppress(FileNotFoundError):
                _cut_partial_line(self.directory / name)

    def start(
        self,
        header: RunHeader,
        show: Show = lambda row: None,
        boards: Sequence[Board] = (),
    ) -> None:
        """Write ``run.json``.

        From now on, show rows with ``show`` and log their numbers to ``boards``.
        """
        if not self._active:
            return
        self._write(RUN_FILE, header.model_copy(update={"attempt": self.attempt}))
        self._show = show
        self._boards = list(boards)
        show(header)

    def started(self, startup: StartUp) -> None:
        """Write ``startup.json``; on a disk error, training continues without it."""
        if not self._active:
            return
        try:
            self._write(STARTUP_FILE, startup)
        except OSError as error:
            self.write_error = _reason(error)

    def append(self, row: Row) -> None:
        """Append a row to the file of its kind, show it, and log its numbers."""
        if not self._active:
            return
        name = _FILES[type(row)]
        line = row.model_dump_json().encode() + b"\n"
        self._unwritten[name] = self._unwritten.get(name, b"") + line
        self._write_lines()
        if self.write_error not in (None, self._reported_error):
            self._show(self._waiting_event(row.step))
        self._reported_error = self.write_error
        self._show(row)
        if not isinstance(row, EventRow):
            self._log_numbers(row)

    def _write_lines(self) -> None:
        """Write all lines that were not written yet, as far as the disk allows."""
        self.write_error = None
        for name in list(self._unwritten):
            try:
                append_whole(self.directory / name, self._unwritten[name])
                del self._unwritten[name]
            except OSError as error:
                self.write_error = _reason(error)

    def _waiting_event(self, step: int) -> EventRow:
        """Return the event of rows that cannot be written yet."""
        return new_event(
            step,
            "record_waits",
            f"cannot write to {self.directory}: {self.write_error}; training continues"
            " with metrics in memory",
            level="error",
            next_step=(
                "Free disk space or raise the quota; the metrics are then written."
            ),
        )

    def _log_numbers(self, row: StepRow | EvaluationRow) -> None:
        """Log a row's numbers to all boards; leave out boards that fail."""
        group = "train" if isinstance(row, StepRow) else "validation"
        numbers = {
            f"{group}/{name}": value
            for name, value in row.model_dump(exclude_none=True).items()
            if name != "step"
        }
        for board in list(self._boards):
            try:
                board.add(row.step, numbers)
            except Exception as error:  # noqa: BLE001 - the border: no error of a logger may end a run
                self._boards.remove(board)
                self.append(board_failed(row.step, board.name, error))

    def close(self) -> None:
        """Flush and close all boards; the record itself is complete after each row."""
        for board in self._boards:
            with contextlib.suppress(Exception):  # no error of a logger may end a run
                board.close()

    def finish(self, end: RunExit) -> None:
        """Write ``exit.json``; any rank may call it, as rank 0 may be gone."""
        self._write(EXIT_FILE, end)

    def _write(self, name: str, value: StrictTable) -> None:
        write_atomically(self.directory / name, value.model_dump_json(indent=2) + "\n")


def _cut_partial_line(path: Path) -> None:
    """Cut the end of a file after its last whole line."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def board_failed(step: int, name: Logger, error: Exception) -> EventRow:
    """Return the event of a board that failed: training continues without it."""
    return new_event(
        step,
        "board_failed",
        f"cannot log to {name}: {error}; training continues without it",
        level="warning",
        next_step="The run record has the same numbers.",
    )


def default_run_directory(name: str) -> Path:
    """Return ``runs/<UTC>-<name>`` under the working directory."""
    return Path(f"runs/{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{name}")
