"""The work directory of one preparation: results of tasks, each whole or absent, so that a run goes on where it ended.

    .NAME.KEY.partial/        beside the final directory, for this user only
      lock                    held by the running process; the kernel lets go of it with the process
      STAGE/TASK/             a finished task: its files and receipt.json
      dataset/                the final files, gathered at the end

A task writes into a directory of a name of its own and renames it when everything in it is on disk. Whoever is killed
leaves a directory that counts for nothing, and a task that is done twice leaves one result, which is the same.
"""

import contextlib
import errno
import glob
import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import BadInput
from trainer.disk import LockHeld, locked, sync

Receipt = dict[str, Any]
"""What a finished task says of itself: JSON values, small, as all of a stage are held at once."""

_RECEIPT = "receipt.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """A work directory, by its path: it travels to other processes."""

    path: Path

    def directory(self, stage: str, task: str) -> Path:
        """Where a finished task's files lie."""
        return self.path / stage / task

    def receipt(self, stage: str, task: str) -> Receipt | None:
        """What a task said when it was finished; None when it is not."""
        try:
            receipt: Receipt = json.loads((self.directory(stage, task) / _RECEIPT).read_bytes())
        except FileNotFoundError:
            return None
        return receipt

    @contextlib.contextmanager
    def unfinished(self, stage: str, task: str) -> Iterator["UnfinishedTask"]:
        """A directory to work in; it is removed if the block fails."""
        directory = self.path / stage / f"{_UNFINISHED}{task}-{secrets.token_hex(4)}"
        directory.mkdir(parents=True)
        try:
            yield UnfinishedTask(directory=directory, final=self.directory(stage, task))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what killed processes left behind."""
        for directory in self.path.glob(f"*/{_UNFINISHED}*"):
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedTask:
    """A task at work."""

    directory: Path
    final: Path

    def finish(self, receipt: Receipt) -> Receipt:
        """Put everything on disk, and make it count in one step."""
        (self.directory / _RECEIPT).write_text(json.dumps(receipt, sort_keys=True))
        for path in self.directory.iterdir():
            sync(path)
        sync(self.directory)
        try:
            self.directory.rename(self.final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Somebody else finished the same task; the results are equal.
        sync(self.final.parent)
        return receipt


def workplace_path(out: Path, key: str) -> Path:
    """The work directory of a preparation."""
    return out.parent / f".{out.name}.{key}.partial"


@contextlib.contextmanager
def open_workplace(out: Path, key: str) -> Iterator[Workplace]:
    """Take the work directory of a preparation, new or left by an earlier run, for this process alone.

    It stays when the block fails; ``remove`` is for the end.

    Raises:
        BadInput: If another process works there.
    """
    path = workplace_path(out, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    workplace = Workplace(path=path)
    try:
        with locked(path / "lock", needed=False):
            workplace.remove_unfinished()
            yield workplace
    except LockHeld as error:
        raise BadInput(
            f"another process is preparing {out} right now",
            next_step="Wait for it, or choose another --out.",
        ) from error


def other_workplaces(out: Path, key: str) -> list[tuple[Path, int]]:
    """Unfinished preparations of the same directory with other settings or files, and their sizes in bytes."""
    mine = workplace_path(out, key)
    found = [path for path in out.parent.glob(f".{glob.escape(out.name)}.*.partial") if path != mine]
    return [(path, sum(file.stat().st_size for file in path.rglob("*") if file.is_file())) for path in sorted(found)]
