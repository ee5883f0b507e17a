"""Where a dataset goes: checked before the work, private while it is built, published in one step."""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import BadInput
from trainer.dataset import MANIFEST_NAME, TOKENIZER_NAME

_DATASET_NAMES = re.compile(rf"{re.escape(MANIFEST_NAME)}|{re.escape(TOKENIZER_NAME)}|(tokens|offsets)-\d{{5,}}\.npy")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlace:
    """A private directory beside the final one.

    Args:
        dataset: An empty directory that is to become the dataset, with the permissions of any new directory.
        scratch: An empty directory for everything else.
    """

    dataset: Path
    scratch: Path


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
    with _cannot_write(out):
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


@contextlib.contextmanager
def build_beside(out: Path, *, overwrite: bool) -> Iterator[BuildPlace]:
    """Give a private place to build in; if the block ends well, publish its dataset as ``out`` in one step.

    Whatever happens, nothing but the finished dataset remains.

    Raises:
        BadInput: If the place is taken or cannot be written; known before the block runs.
    """
    check_place(out, overwrite=overwrite)
    final = out.resolve()
    with _cannot_write(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        # mkdtemp makes it for this user only, 0700.
        private = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    try:
        build_place = BuildPlace(dataset=private / "dataset", scratch=private / "scratch")
        with _cannot_write(final):
            build_place.dataset.mkdir()
            build_place.scratch.mkdir()
            yield build_place
            # Again: the work took time, and someone may have put something there.
            check_place(out, overwrite=overwrite)
            _publish(build_place.dataset, final)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _publish(dataset: Path, final: Path) -> None:
    _sync(dataset)
    if final.is_dir() and any(final.iterdir()):
        _exchange(dataset, final)
    else:
        # Onto nothing or onto an empty directory: one atomic step.
        dataset.rename(final)
    _sync(final.parent)


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


def _sync(directory: Path) -> None:
    """Make new names durable; file systems that cannot are left alone."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _cannot_write(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write {path}: {error.strerror or error}",
            next_step="Choose another --out, or free space or permissions there.",
        ) from error
