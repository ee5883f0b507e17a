"""The work directory of a preparation, and its output directory.

The output directory is checked first, and published in one step.

    .NAME.KEY.partial/   beside the final directory, for this user only
      lock               held by the running process; the kernel releases it at its end
      STAGE/TASK/        a finished task: its files and receipt.json
      dataset/           the final files, gathered at the end

A task writes into a directory with a unique name and renames it once everything is on
disk, so the directory of a killed process is ignored, and a task that runs twice leaves
one result.
"""

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.base.units import format_bytes, format_count
from autotune.corpus.bounded import DISK_FULL
from autotune.errors import BadInput
from trainer.formats.file_locks import LockHeld, locked
from trainer.formats.files import sync
from trainer.formats.manifest import DATASET_FILES, MANIFEST_NAME
from trainer.formats.progress import Update

Receipt = dict[str, Any]
"""Result of a finished task: small JSON values, as a whole stage's are held in
memory."""

_RECEIPT = "receipt.json"
_UNFINISHED = ".unfinished-"
"""Beginning of the name of a directory whose task has not finished."""
_DATASET_NAMES = re.compile(
    "|".join(map(re.escape, DATASET_FILES))
    + r"|(train-|validation-)?(tokens|offsets)-\d{5,}\.npy"
)
"""Names of the files of a dataset."""

# Arguments of renameat2(2), from <linux/fcntl.h> and <linux/fs.h>.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """A work directory, given by its path so that it can be sent to other processes."""

    path: Path

    @property
    def dataset(self) -> Path:
        """Directory in which the final files are gathered."""
        return self.path / "dataset"

    def directory(self, stage: str, task: int) -> Path:
        """Return the directory of a finished task's files."""
        return self.path / stage / f"{task:08d}"

    def receipt(self, stage: str, task: int) -> Receipt | None:
        """Return the receipt of a finished task; None if it is not finished."""
        path = self.directory(stage, task) / _RECEIPT
        return json.loads(path.read_bytes()) if path.exists() else None

    def perform(
        self, stage: str, task: int, work: Callable[[Path], Receipt]
    ) -> Receipt:
        """Run a task unless it is finished.

        It is committed in one step, or leaves nothing.

        Returns:
            The receipt of the task.
        """
        earlier_receipt = self.receipt(stage, task)
        if earlier_receipt is not None:
            return earlier_receipt
        final = self.directory(stage, task)
        directory = final.with_name(f"{_UNFINISHED}{task}-{secrets.token_hex(4)}")
        directory.mkdir(parents=True)
        try:
            receipt = work(directory)
            (directory / _RECEIPT).write_text(json.dumps(receipt, sort_keys=True))
            for path in directory.iterdir():
                sync(path)
            sync(directory)
            try:
                directory.rename(final)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Another process finished the same task; the results are equal.
            sync(final.parent)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return receipt


def workplace_path(out: Path, key: str) -> Path:
    """Return the work directory of a preparation."""
    return out.parent / f".{out.name}.{key}.partial"


@contextlib.contextmanager
def open_workplace(out: Path, key: str) -> Iterator[Workplace]:
    """Lock a work directory, which stays, and clean it of incomplete files.

    Raises:
        BadInput: If another process has locked it.
    """
    path = workplace_path(out, key)
    # The mode is that of the last directory only.
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with locked(path / "lock", needed=False):
            for directory in path.glob(f"*/{_UNFINISHED}*"):
                shutil.rmtree(directory, ignore_errors=True)
            for file in path.glob("dataset/.*"):
                file.unlink()
            yield Workplace(path=path)
    except LockHeld as error:
        raise BadInput(
            f"another process is preparing {out}",
            next_step="Wait until it ends, or choose another --out.",
        ) from error


def other_workplaces(out: Path, key: str) -> list[tuple[Path, int]]:
    """Find unfinished preparations of the same directory, with their sizes in bytes.

    They have other settings or files.
    """
    others = []
    for path in sorted(out.parent.glob(f".{glob.escape(out.name)}.*.partial")):
        if path != workplace_path(out, key):
            files = [file for file in path.rglob("*") if file.is_file()]
            others.append((path, sum(file.stat().st_size for file in files)))
    return others


def check_place(out: Path, *, overwrite: bool) -> None:
    """Check that an output directory can be written without a loss of content.

    Raises:
        BadInput: Unless the directory is missing, empty, or a dataset to ``overwrite``.
    """
    choose_other = "Choose another --out."
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise BadInput(f"{out} exists and is not a directory", next_step=choose_other)
    with writing(out):
        names = sorted(entry.name for entry in out.iterdir())
    if names and MANIFEST_NAME not in names:
        raise BadInput(
            f"{out} is neither empty nor a dataset: it contains {names[0]!r}",
            next_step=choose_other,
        )
    if names and not overwrite:
        raise BadInput(
            f"{out} already contains a dataset",
            next_step="Choose another --out, or use --overwrite",
        )
    for name in names:
        if not _DATASET_NAMES.fullmatch(name):
            raise BadInput(
                f"{out} contains {name!r}, which does not belong to the dataset and"
                " would be lost",
                next_step="Move it away, or choose another --out.",
            )


def publish(dataset: Path, final: Path) -> None:
    """Rename a finished directory to its final path in one step.

    An earlier dataset is left in the work directory.
    """
    sync(dataset)
    if final.is_dir() and any(final.iterdir()):
        _exchange(dataset, final)
    else:
        # Atomic if the target is missing or empty.
        dataset.rename(final)
    sync(final.parent)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one step.

    If the file system cannot, both are renamed.
    """
    # None: an old C library.
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        new_name = os.fsencode(new)
        old_name = os.fsencode(old)
        result = rename(_AT_FDCWD, new_name, _AT_FDCWD, old_name, _RENAME_EXCHANGE)
        if result == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), str(old))
    # Network file systems cannot swap; the dataset is missing for a moment, but never
    # partial.
    aside = new.with_name("replaced")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translate any ``OSError`` of the block, which writes to ``path``.

    Raises:
        BadInput: For an ``OSError``, with a next step.
    """
    try:
        yield
    except OSError as error:
        problem = "cannot write"
        next_step = "Choose another --out, or change the permissions."
        if error.errno in DISK_FULL:
            problem = "no space left for"
            next_step = (
                "Free disk space or raise the quota, and run the same command again to"
                " resume."
            )
        raise BadInput(
            f"{problem} {path}: {error.strerror or error}", next_step=next_step
        ) from error


class StageMeter:
    """Progress and rate of a stage; work of an earlier run counts for progress only."""

    def __init__(self, update: Update, total: int, *, in_bytes: bool) -> None:
        self._update = update
        self._total = total
        self._in_bytes = in_bytes
        self.done = 0
        """Amount of finished work, that of an earlier run included."""
        self._fresh = 0
        self._started_s = time.monotonic()

    def add(self, amount: int, *, fresh: bool = True) -> None:
        """Add finished work; it is not ``fresh`` if an earlier run did it."""
        self.done += amount
        if fresh:
            self._fresh += amount
        self._update(self.done, self._total, self._note())

    def finish(self) -> None:
        """End the stage, even if not all of it was needed."""
        if self.done != self._total:
            self._update(self.done, self.done, self._note())

    def _note(self) -> str:
        """Return the amount in words, with the rate of this run."""
        if not self._in_bytes:
            return f"{format_count(self.done)} of {format_count(self._total)} tasks"
        note = f"{format_bytes(self.done)} of {format_bytes(self._total)}"
        seconds = time.monotonic() - self._started_s
        if self._fresh and seconds > 0:
            note += f", {format_bytes(round(self._fresh / seconds))}/s"
        return note
