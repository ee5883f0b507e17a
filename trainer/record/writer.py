"""Writer of the run record during training.

``trainer.formats.run_record`` documents its files.
"""

import contextlib
import datetime
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from trainer.formats.errors import BadConfig
from trainer.formats.events import EventRow, new_event
from trainer.formats.file_locks import LockHeld, open_locked
from trainer.formats.files import append_whole, write_atomically
from trainer.formats.run_record import (
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
from trainer.formats.tables import StrictTable
from trainer.formats.train_config import Logger

Row = StepRow | EvaluationRow | EventRow
Show = Callable[[RunHeader | Row], None]
"""Callback on rank 0 that shows the run header, and then each row."""

_FILE_OF_ROW: Mapping[type[Row], str] = {
    StepRow: STEPS_FILE,
    EvaluationRow: EVALUATIONS_FILE,
    EventRow: EVENTS_FILE,
}
"""Name of the file that has the rows of a kind."""
_LOCK_TIMEOUT_S = 30.0
"""Longest wait for a run's lock, which DataLoader workers of a killed process hold for
a moment."""


class Board(Protocol):
    """A logger's log of one run, open for writing."""

    name: Logger
    """Name of the logger, as in ``train.log_to``."""

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step."""

    def close(self) -> None:
        """Flush and close."""


class RunWriter:
    """Writes a run record, shows its rows, and logs their numbers to boards.

    Args:
        directory: Run directory.
        records: Whether to write the record, as rank 0 does; the writers of other ranks
            write nothing but the exit.
        may_resume: Whether the directory may contain a run, which this start resumes.

    Raises:
        BadConfig: If the directory contains a run that must not be resumed, or if
            another process uses it.
        OSError: If the directory cannot be written.
    """

    def __init__(
        self, directory: Path, *, records: bool = True, may_resume: bool = False
    ) -> None:
        self.directory = directory
        self.attempt = 1
        """Number of this start of the run, counted from 1."""
        self.lock: int | None = None
        """Descriptor of the lock that keeps other processes from this run; None if the
        file system has no locks."""
        self.write_error: str | None = None
        """Reason of the last error, such as a full disk; None if all is written. Rows
        that are not written wait in memory, and are retried with the next row."""
        self._reported_error: str | None = None
        """Value of ``write_error`` that was shown last, so that it is shown once."""
        self._records = records
        self._show: Show = lambda row: None
        self._boards: list[Board] = []
        self._unwritten: dict[str, bytes] = {}
        """Lines still to be written, by file name."""
        if records:
            self._open(may_resume=may_resume)

    def _open(self, *, may_resume: bool) -> None:
        """Create and lock the directory, and set the files of the last start aside."""
        if not may_resume and (self.directory / RUN_FILE).exists():
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
        try:
            # A start that failed before it wrote run.json has left an exit.json.
            if any((self.directory / name).exists() for name in (RUN_FILE, EXIT_FILE)):
                self._set_last_start_aside()
                self._cut_partial_lines()
        except BaseException:
            if self.lock is not None:
                os.close(self.lock)
                self.lock = None
            raise

    def _set_last_start_aside(self) -> None:
        """Keep the files of the last start in ``earlier/N``, and count this one."""
        root = self.directory / EARLIER_DIRECTORY
        root.mkdir(exist_ok=True)
        # Starts are counted from 1, and the last one is not set aside yet.
        earlier = [int(path.name) for path in root.iterdir() if path.name.isdecimal()]
        last_attempt = max(earlier) + 1 if earlier else 1
        self.attempt = last_attempt + 1
        aside = root / str(last_attempt)
        aside.mkdir()
        # Copied, not moved, as run.json marks the directory as a run.
        partial = aside / f".{RUN_FILE}.partial"
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(self.directory / RUN_FILE, partial)
            partial.rename(aside / RUN_FILE)
        for name in (STARTUP_FILE, EXIT_FILE):
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).rename(aside / name)

    def _cut_partial_lines(self) -> None:
        """Cut off the line in each file that a killed start has written in part."""
        for name in _FILE_OF_ROW.values():
            with contextlib.suppress(FileNotFoundError):
                _cut_partial_line(self.directory / name)

    def start(
        self,
        header: RunHeader,
        show: Show = lambda row: None,
        boards: Sequence[Board] = (),
    ) -> None:
        """Write ``run.json``, and show the header.

        Args:
            header: Content of ``run.json``; the number of this start is set here.
            show: Callback that shows the header now, and each row from now on.
            boards: Boards that get the numbers of each row from now on.
        """
        if not self._records:
            return
        self._write(RUN_FILE, header.model_copy(update={"attempt": self.attempt}))
        self._show = show
        self._boards = list(boards)
        show(header)

    def write_startup(self, startup: StartUp) -> None:
        """Write ``startup.json``; on a disk error, training continues without it."""
        if not self._records:
            return
        try:
            self._write(STARTUP_FILE, startup)
        except OSError as error:
            self.write_error = _reason(error)

    def append(self, row: Row) -> None:
        """Append a row to the file of its kind, show it, and log its numbers.

        On a disk error the row waits in memory, and an event is shown.
        """
        if not self._records:
            return
        name = _FILE_OF_ROW[type(row)]
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
        """Write all lines that wait; lines that cannot be written continue to wait."""
        self.write_error = None
        for name in list(self._unwritten):
            try:
                append_whole(self.directory / name, self._unwritten[name])
                del self._unwritten[name]
            except OSError as error:
                self.write_error = _reason(error)

    def _waiting_event(self, step: int) -> EventRow:
        """Return the event of rows that cannot be written, and wait in memory."""
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
        """Log a row's numbers to all boards; drop boards that fail, and report them."""
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
                self.append(board_failed_event(row.step, board.name, error))

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


def board_failed_event(step: int, name: Logger, error: Exception) -> EventRow:
    """Return the event of a board that failed, without which training continues."""
    return new_event(
        step,
        "board_failed",
        f"cannot log to {name}: {error}; training continues without it",
        level="warning",
        next_step="The run record has the same numbers.",
    )


def default_run_directory(name: str) -> Path:
    """Return the directory of a run that starts now, for a model of this name.

    It is ``runs/<UTC>-<name>``, under the working directory.
    """
    return Path(f"runs/{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{name}")
