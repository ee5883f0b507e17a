"""Where a dataset goes: checked before the work, published in one step."""

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from autotune.corpus.bounded import DISK_FULL
from autotune.errors import BadInput
from trainer.dataset import MANIFEST_NAME, PREPARED_NAME, REJECTS_NAME, TOKENIZER_NAME
from trainer.disk import sync

_DATASET_NAMES = re.compile(
    "|".join(map(re.escape, (MANIFEST_NAME, TOKENIZER_NAME, REJECTS_NAME, PREPARED_NAME)))
    + r"|(train-|validation-)?(tokens|offsets)-\d{5,}\.npy"
)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_place(out: Path, *, overwrite: bool) -> None:
    """Refuse a place whose content would be lost.

    Raises:
        BadInput: If it is a file or holds anything, unless it is a dataset and ``overwrite`` is set.
    """
    elsewhere = "Choose another --out."
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise BadInput(f"{out} exists and is not a directory", next_step=elsewhere)
    with writing(out):
        names = sorted(entry.name for entry in out.iterdir())
    if not names:
        return
    if MANIFEST_NAME not in names:
        raise BadInput(f"{out} is not empty and not a dataset: it holds {names[0]!r}", next_step=elsewhere)
    if not overwrite:
        raise BadInput(f"{out} holds a dataset already", next_step="Choose another --out, or replace it: --overwrite")
    foreign = [name for name in names if not _DATASET_NAMES.fullmatch(name)]
    if foreign:
        raise BadInput(
            f"{out} holds {foreign[0]!r}, which is no part of a dataset and would be lost",
            next_step="Move it away, or choose another --out.",
        )


def publish(dataset: Path, final: Path) -> None:
    """Give a finished directory its name, in one step; what had the name before is left at the old path."""
    sync(dataset)
    if final.is_dir() and any(final.iterdir()):
        _exchange(dataset, final)
    else:
        # Onto nothing or onto an empty directory: one atomic step.
        dataset.rename(final)
    sync(final.parent)


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories, so that the name always shows one of them whole."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        failed = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE)
    except AttributeError:  # a C library without the call
        failed, code = -1, errno.ENOSYS
    else:
        code = ctypes.get_errno()
    if not failed:
        return
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(old))
    # Network file systems cannot swap: for a moment there is no dataset, never a half one.
    aside = new.with_name("replaced")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what to do when something cannot be written.

    Raises:
        BadInput: For any error of the operating system.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise BadInput(
                f"no space left for {path}: {error.strerror}",
                next_step="Free some, or raise the quota; the same command then goes on from where it was.",
            ) from error
        raise BadInput(
            f"cannot write {path}: {error.strerror or error}",
            next_step="Choose another --out, or ask for permission there.",
        ) from error
