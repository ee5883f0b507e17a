"""Checkpoints in the directory of a run: list, read, find and remove them.

``trainer.checkpoint.format`` documents their files. No torch here.
"""

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.format import (
    CHECKPOINT_NAME,
    MANIFEST_FILE,
    BadCheckpoint,
    CheckpointManifest,
    parse_manifest,
    step_of,
)
from trainer.formats.errors import BadConfig, DiskTrouble
from trainer.formats.files import CorruptFile, check_file, write_atomically
from trainer.formats.tables import read_json


def list_checkpoints(root: Path) -> list[Path]:
    """List published checkpoints, newest first.

    A checkpoint after more rollbacks is newer, even if its step is lower.

    Args:
        root: Directory of a run's checkpoints; if it is missing, the list is empty.
    """
    try:
        entries = list(root.iterdir())
    except FileNotFoundError:
        return []
    checkpoints = []
    for path in entries:
        has_name = CHECKPOINT_NAME.fullmatch(path.name) is not None
        if has_name and path.is_dir() and not path.is_symlink():
            checkpoints.append(path)
    return sorted(checkpoints, key=_recency, reverse=True)


def _recency(checkpoint: Path) -> tuple[int, int, str]:
    """Return a sort key of a checkpoint, which is greater for a newer one.

    It is the number of rollbacks, the step, and the name, so that the order is the same
    every time.
    """
    match = CHECKPOINT_NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    step, rollbacks = match.groups(default="0")
    return int(rollbacks), int(step), checkpoint.name


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """Intact checkpoint on disk."""

    path: Path
    """Directory of the checkpoint."""
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptCheckpoint:
    """Checkpoint on disk that cannot be used."""

    path: Path
    """Directory of the checkpoint."""
    reason: str


def read_checkpoint(directory: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest and verify size and checksum of all its files.

    Raises:
        BadCheckpoint: If a file is missing or was changed.
        DiskTrouble: If the file system fails, so that the checkpoint may be intact.
        BadConfig: If this user is not allowed to read it.
    """
    manifest = _read_manifest(directory)
    try:
        for file in manifest.files:
            check_file(directory / file.name, file)
    except CorruptFile as error:
        raise BadCheckpoint(str(error)) from error
    except OSError as error:
        raise _unreadable(directory, error) from error
    return manifest


def _read_manifest(directory: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest; the errors are those of ``read_checkpoint``."""
    path = directory / MANIFEST_FILE
    try:
        return parse_manifest(read_json(path), str(path))
    except BadConfig as error:
        # Errors of the operating system have become ``BadConfig`` in ``read_json``.
        if isinstance(error.__cause__, OSError):
            raise _unreadable(directory, error.__cause__) from error
        raise BadCheckpoint(error.message) from error


def _unreadable(
    directory: Path, error: OSError
) -> BadCheckpoint | BadConfig | DiskTrouble:
    """Return the exception to raise for a read error of the operating system.

    It is ``BadCheckpoint`` only if a file is missing or is no plain file. Any other
    error may not occur on the next try, so the checkpoint may be intact.
    """
    path = error.filename or directory
    message = f"cannot read {path}: {error.strerror or error}"
    is_missing = isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError
    )
    if is_missing or error.errno == errno.ELOOP:  # ELOOP: a link to itself
        return BadCheckpoint(message)
    if isinstance(error, PermissionError):
        return BadConfig(message, next_step="Make it readable for this user.")
    return DiskTrouble(
        message,
        next_step=(
            "Run the same command again once the file system is available: it resumes"
            " from that checkpoint."
        ),
    )


def newest_checkpoint(
    root: Path, *, only_good: bool = False
) -> tuple[StoredCheckpoint | None, list[CorruptCheckpoint]]:
    """Find the newest intact checkpoint, by reading all of its files.

    Args:
        root: Directory of a run's checkpoints.
        only_good: Whether to skip checkpoints that are not marked as good.

    Returns:
        The checkpoint, None if there is none, and the corrupt ones that are newer.

    Raises:
        DiskTrouble: If the file system fails.
        BadConfig: If this user is not allowed to read a checkpoint.
    """
    corrupt: list[CorruptCheckpoint] = []
    for path in list_checkpoints(root):
        try:
            manifest = read_checkpoint(path)
        except BadCheckpoint as error:
            corrupt.append(CorruptCheckpoint(path=path, reason=str(error)))
            continue
        if manifest.state.good or not only_good:
            return StoredCheckpoint(path=path, manifest=manifest), corrupt
    return None, corrupt


def prune(root: Path, *, keep_last: int, keep_every_steps: int | None) -> list[str]:
    """Remove old checkpoints, but never the newest good one.

    Args:
        root: Directory of a run's checkpoints.
        keep_last: Number of newest checkpoints to keep.
        keep_every_steps: Keep checkpoints whose step is a multiple of this number; None
            keeps no others.

    Returns:
        Names of the removed checkpoints.

    Raises:
        DiskTrouble: If a manifest cannot be read, as the file system fails.
        BadConfig: If this user is not allowed to read a manifest.
        OSError: If a checkpoint cannot be renamed.
    """
    checkpoints = list_checkpoints(root)
    kept = set(checkpoints[:keep_last])
    if keep_every_steps:
        kept.update(
            path for path in checkpoints if step_of(path.name) % keep_every_steps == 0
        )
    newest_good = _newest_marked_good(checkpoints)
    if newest_good is not None:
        kept.add(newest_good)
    removed = [path for path in checkpoints if path not in kept]
    for path in removed:
        # Renamed first, so that a partly removed checkpoint does not look corrupt.
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return [path.name for path in removed]


def _newest_marked_good(checkpoints: Iterable[Path]) -> Path | None:
    """Return the first of the checkpoints that is marked as good.

    Only manifests are read, not the large files that they describe. A checkpoint with a
    corrupt manifest is skipped.

    Args:
        checkpoints: Directories of checkpoints, newest first.

    Returns:
        None if no checkpoint is marked as good.
    """
    for path in checkpoints:
        with contextlib.suppress(BadCheckpoint):
            if _read_manifest(path).state.good:
                return path
    return None


def clear_leftovers(root: Path) -> None:
    """Remove unfinished files of earlier starts of this run.

    Call it only while no other process uses the run.

    Args:
        root: Directory of the run's checkpoints.
    """
    for pattern in (".step-*.partial", ".step-*.removed", ".step-*.replaced"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def point_to_latest(root: Path, name: str) -> None:
    """Write a checkpoint's name to ``latest``.

    Errors are ignored, as training never reads the file.
    """
    with contextlib.suppress(OSError):
        write_atomically(root / "latest", f"{name}\n")
