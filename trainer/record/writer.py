"""Writer of the run record during training.

``trainer.record.run_record`` documents its files. No torch here.
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
from trainer.record import run_record
from trainer.record.run_record import (
    EXIT_FILE,
    RUN_FILE,
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
    StepRow: run_record.STEPS_FILE,
    EvaluationRow: run_record.EVALUATIONS_FILE,
    EventRow: run_record.EVENTS_FILE,
}
_LOCK_TIMEOUT_S = 30.0


class Board(Protocol):
    """A logger, open for one run."""

    name: Logger

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers at a step."""

    def close(self) -> None:
        """Flush and close."""


class RunWriter:
    """Writes and shows a run record.

    On ranks other than 0 (not ``active``), only ``finish`` has an effect.

    Raises ``BadConfig`` if the directory has a run already, unless ``again`` (resume),
    or if another process uses it.
    """

    def __init__(self, directory: Path, *, active: bool, again: bool = False) -> None:
        self.directory, self.attempt, self._active = directory, 1, active
        self.lock: int | None = None
        """Descriptor of the lock that keeps other processes from this run; None if the
        file system has no locks."""
        self._show: Show = lambda row: None
        self._boards: list[Board] = []
        self._waiting: dict[str, bytes] = {}
        self.trouble: str | None = None
        """Reason why rows are not written yet, such as a full disk; they are retried
        with the next row."""
        self._told_trouble: str | None = None
        if not active:
            return
        if not again and (directory / RUN_FILE).exists():
            next_step = "Resume it with --resume auto, or choose another --out."
            raise BadConfig(f"{directory} already contains a run", next_step=next_step)
        directory.mkdir(parents=True, exist_ok=True)
        try:  # DataLoader workers of a killed process hold its lock for a moment
            self.lock = open_locked(
                directory / run_record.LOCK_FILE, _LOCK_TIMEOUT_S, needed=False
            )
        except LockHeld as error:
            next_step = "Wait until it ends, or choose another --out."
            raise BadConfig(
                f"another process is using {directory}", next_step=next_step
            ) from error
        # The exit.json of a start that ended before its run.json counts as a start too.
        if any((directory / name).exists() for name in (RUN_FILE, EXIT_FILE)):
            self._put_earlier_aside()

    def _put_earlier_aside(self) -> None:
        place = self.directory / run_record.EARLIER_DIRECTORY
        place.mkdir(exist_ok=True)
        self.attempt = 2 + max(
            (int(path.name) for path in place.iterdir() if path.name.isdecimal()),
            default=0,
        )
        earlier = place / str(self.attempt - 1)
        earlier.mkdir()
        # Copied, not moved, as run.json marks the directory as a run.
        partial = earlier / f".{RUN_FILE}.partial"
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(self.directory / RUN_FILE, partial)
            partial.rename(earlier / RUN_FILE)
        for name in (run_record.STARTUP_FILE, EXIT_FILE):
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).rename(earlier / name)
        for name in _FILES.values():  # end a partial last line
            with (
                contextlib.suppress(FileNotFoundError),
                (self.directory / name).open("rb+") as file,
            ):
                file.truncate(file.read().rfind(b"\n") + 1)

    def start(
        self,
        header: RunHeader,
        show: Show = lambda row: None,
        boards: Sequence[Board] = (),
    ) -> None:
        """Write ``run.json``.

        From now on, show rows with ``show`` and draw their numbers on ``boards``.
        """
        if self._active:
            self._write(RUN_FILE, header.model_copy(update={"attempt": self.attempt}))
            self._show, self._boards = show, list(boards)
            show(header)

    def started(self, startup: StartUp) -> None:
        """Write ``startup.json``; on a disk error, training continues without it."""
        if self._active:
            try:
                self._write(run_record.STARTUP_FILE, startup)
            except OSError as error:
                self.trouble = error.strerror or str(error)

    def finish(self, end: RunExit) -> None:
        """Write ``exit.json``; any rank may call it, as rank 0 may be gone."""
        self._write(EXIT_FILE, end)

    def append(self, row: Row) -> None:
        """Append a row to the file of its kind, show it, and draw its numbers on all boards."""
        if not self._active:
            return
        name = _FILES[type(row)]
        self._waiting[name] = (
            self._waiting.get(name, b"") + row.model_dump_json().encode() + b"\n"
        )
        self.trouble = None
        for waiting in list(self._waiting):
            try:
                append_whole(self.directory / waiting, self._waiting[waiting])
                del self._waiting[waiting]
            except OSError as error:
                self.trouble = error.strerror or str(error)
        if self.trouble not in (None, self._told_trouble):
            message = (
                f"cannot write to {self.directory}: {self.trouble}; training continues"
                " with metrics in memory"
            )
            next_step = (
                "Free disk space or raise the quota; the metrics are then written."
            )
            self._show(
                new_event(
                    row.step,
                    "record_waits",
                    message,
                    level="error",
                    next_step=next_step,
                )
            )
        self._told_trouble = self.trouble
        self._show(row)
        if not isinstance(row, EventRow):
            self._draw(row)

    def _draw(self, row: StepRow | EvaluationRow) -> None:
        group, figures = (
            "train" if isinstance(row, StepRow) else "validation",
            row.model_dump(exclude_none=True),
        )
        numbers = {
            f"{group}/{figure}": value
            for figure, value in figures.items()
            if figure != "step"
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

    def _write(self, name: str, value: StrictTable) -> None:
        write_atomically(self.directory / name, value.model_dump_json(indent=2) + "\n")


def board_failed(step: int, name: Logger, error: Exception) -> EventRow:
    """Return the event of a board that failed, after which training continues without it."""
    message = f"cannot log to {name}: {error}; training continues without it"
    return new_event(
        step,
        "board_failed",
        message,
        level="warning",
        next_step="The run record has the same numbers.",
    )


def default_run_directory(name: str) -> Path:
    """Return ``runs/<UTC>-<name>`` under the working directory."""
    return Path(f"runs/{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{name}")
