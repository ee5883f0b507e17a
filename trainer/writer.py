"""Writes the run record while training goes on; ``trainer.record`` says what is in it. No torch here."""

import contextlib
import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path

from trainer.disk import NO_LOCKS, LockHeld, append_whole, open_locked, write_atomically
from trainer.errors import BadConfig
from trainer.events import EventRow
from trainer.record import (
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
from trainer.schema import Table

Row = StepRow | EvaluationRow | EventRow

_FILES: Mapping[type[Row], str] = {StepRow: STEPS_FILE, EvaluationRow: EVALUATIONS_FILE, EventRow: EVENTS_FILE}
_LOCK_TIMEOUT_S = 30.0


class RunWriter:
    """Writes a run record; on every rank but the first, all of it but the end does nothing.

    Where a run is there already, it goes on only if asked to ``again``.

    Raises:
        BadConfig: If the directory holds a run already and must not, or another process is at it: one record must not
            be mixed with another's.
    """

    def __init__(self, directory: Path, *, active: bool, again: bool = False) -> None:
        self.directory = directory
        self.attempt = 1
        self._active = active
        self._lock: int | None = None
        self._waiting: dict[str, bytes] = {}
        self.trouble: str | None = None
        """Why rows wait to be written, such as a full disk; they are written when it has gone."""
        if not active:
            return
        there = (directory / RUN_FILE).exists()
        if there and not again:
            raise BadConfig(
                f"{directory} holds a run already", next_step="Go on with it: --resume auto; or choose another --out."
            )
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory / LOCK_FILE)
        # A start that ended before it knew what it would train, such as one that never met the others, leaves its end
        # alone: it counts, and must not be taken for this one's.
        if any((directory / name).exists() for name in (RUN_FILE, EXIT_FILE)):
            self._put_earlier_aside()

    @property
    def locked(self) -> bool:
        """Whether another process that came to this run would be kept away."""
        return self._lock is not None

    def _put_earlier_aside(self) -> None:
        place = self.directory / EARLIER_DIRECTORY
        place.mkdir(exist_ok=True)
        self.attempt = 2 + max((int(path.name) for path in place.iterdir() if path.name.isdecimal()), default=0)
        earlier = place / str(self.attempt - 1)
        earlier.mkdir()
        # A copy: as long as no other takes its place, this is what says that here is a run.
        partial = earlier / f".{RUN_FILE}.partial"
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(self.directory / RUN_FILE, partial)
            partial.rename(earlier / RUN_FILE)
        for name in (STARTUP_FILE, EXIT_FILE):
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).rename(earlier / name)
        for name in _FILES.values():
            _cut_torn_tail(self.directory / name)

    def start(self, header: RunHeader) -> None:
        """Write ``run.json``."""
        if self._active:
            self._write(RUN_FILE, header)

    def started(self, startup: StartUp) -> None:
        """Write ``startup.json``; on a full disk training goes on without."""
        if self._active:
            try:
                self._write(STARTUP_FILE, startup)
            except OSError as error:
                self.trouble = error.strerror or str(error)

    def finish(self, end: RunExit) -> None:
        """Write ``exit.json``; any rank may, as the first may be gone."""
        self._write(EXIT_FILE, end)

    def append(self, row: Row) -> None:
        """Append a row to the file of its kind."""
        if not self._active:
            return
        name = _FILES[type(row)]
        self._waiting[name] = self._waiting.get(name, b"") + row.model_dump_json().encode() + b"\n"
        self.trouble = None
        for waiting in list(self._waiting):
            try:
                append_whole(self.directory / waiting, self._waiting[waiting])
                del self._waiting[waiting]
            except OSError as error:
                self.trouble = error.strerror or str(error)

    def _write(self, name: str, value: Table) -> None:
        write_atomically(self.directory / name, value.model_dump_json(indent=2) + "\n")


def _lock(path: Path) -> int | None:
    """Keep other processes away while this one lives; None on file systems that cannot."""
    try:
        # A killed process's loaders hold on to its lock for the moment until they notice.
        return open_locked(path, _LOCK_TIMEOUT_S)
    except LockHeld as error:
        raise BadConfig(
            f"another process is training in {path.parent}",
            next_step="Wait until it has ended, or choose another --out.",
        ) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None


def _cut_torn_tail(path: Path) -> None:
    """Remove a last line that was not finished, so that the next one begins on its own."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def default_run_directory(name: str) -> Path:
    """``runs/<UTC>-<name>`` under the working directory."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{stamp}-{name}"
