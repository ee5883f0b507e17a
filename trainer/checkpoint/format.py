"""Checkpoints on disk: their format, and how they are checked, found and removed.

``checkpoint_writer`` writes them. No torch here, and no pickle anywhere.

    RUN/checkpoints/
      latest                      name of the newest checkpoint, for you and scripts
      step-000000500/             named after the optimizer step; ends with
                                  `-rollback-K` after K rollbacks of the run
        rank-00000.safetensors    tensors, or parts of tensors, that this rank writes
        manifest.json             written last: size and CRC-32 of each file, location
                                  of tensor parts, training state

A checkpoint is written into a hidden directory, synced, and renamed, so every visible
one was complete. Sizes and checksums detect corruption.
"""

import contextlib
import errno
import json
import re
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.tables import StrictTable, canonical_sha256, parse_table, read_json
from trainer.data.position import Position
from trainer.errors import BadConfig, DiskTrouble
from trainer.files import CorruptFile, FileEntry, check_file, write_atomically

CHECKPOINTS_DIRECTORY = "checkpoints"
MANIFEST_FILE = "manifest.json"
# Numbers are padded, so that names sort by them; large ones may exceed the padding.
_NAME = re.compile(r"step-(\d{9,15})(?:-rollback-(\d{1,6}))?")
"""Name of a published checkpoint, with its step and its number of rollbacks."""
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
"""Name of a file of tensors."""
_HASH_KEY = "content_sha256"
"""Key of the manifest's own hash, that of the canonical JSON of all other keys."""


class BadCheckpoint(Exception):
    """Corrupt or incomplete checkpoint; the message gives the reason."""


class Part(StrictTable):
    """Part of a tensor along its first dimension, in one file."""

    file: str
    """Name of the file in the checkpoint's directory."""
    begin: int
    """Index of the part's first element in the first dimension; 0 for a scalar."""
    end: int
    """Index after the part's last element; 1 for a scalar."""


class TensorEntry(StrictTable):
    """Dtype and shape of a tensor, and the files with its parts."""

    dtype: str
    """Name of the dtype in safetensors files, such as ``BF16``."""
    shape: list[int]
    """Shape of the whole tensor."""
    parts: list[Part]
    """Parts of the tensor, in the order of ``begin``."""


class TrainingState(StrictTable):
    """Training state besides tensors.

    Learning rate and dropout are not saved, as they follow from step, seed, position
    and rank.
    """

    step: int
    """Number of optimizer steps taken."""
    position: Position
    """Position in the data, from which training continues."""
    config: dict[str, Any]
    """Settings of the trainer, in the form of the ``[train]`` table of a profile."""
    config_sha256: str
    """SHA-256 of the settings."""
    dataset_hash: str
    """Hash of the pre-tokenised dataset, from its manifest."""
    world_size: int
    """Number of ranks that trained."""
    good: bool
    """True if loss and gradient were healthy, so that a rollback may return to this
    checkpoint."""
    health: dict[str, Any]
    """State of ``trainer.health.monitor.HealthMonitor``, as its ``to_json`` returns
    it."""
    noise_scale: list[float]
    """Smoothed signal and noise from which the gradient noise scale is computed."""
    head_overflows: int
    """Micro-batches of rank 0 so far that exceeded the slots of the sparse MLM head."""
    skipped_steps: int
    """Skipped updates so far."""


class CheckpointManifest(StrictTable):
    """Content of ``manifest.json``, which on disk also contains its own hash."""

    schema_version: Literal[2]
    written_utc: str
    """Time of writing in UTC, in ISO 8601."""
    state: TrainingState
    files: list[FileEntry]
    """Files of tensors, with their sizes and checksums."""
    tensors: dict[str, TensorEntry]
    """Tensors by name."""


def manifest_text(manifest: CheckpointManifest) -> str:
    """Return the content of ``manifest.json``, with its hash."""
    table = manifest.model_dump(mode="json")
    return json.dumps(table | {_HASH_KEY: canonical_sha256(table)})


def parse_manifest(table: object, where: str) -> CheckpointManifest:
    """Validate a manifest's JSON value, called ``where`` in messages.

    Raises:
        BadCheckpoint: If its hash does not match, or if its files' names are wrong.
        BadConfig: If its hash matches, but a key or a value is invalid.
    """
    if not isinstance(table, dict):
        raise BadCheckpoint(f"{where} is not a JSON object")
    content = {key: value for key, value in table.items() if key != _HASH_KEY}
    try:
        is_as_written = table.get(_HASH_KEY) == canonical_sha256(content)
    except ValueError:  # NaN, or half a surrogate pair, neither of which we write
        is_as_written = False
    if not is_as_written:
        raise BadCheckpoint(f"{where} was modified: its hash does not match")
    manifest = parse_table(CheckpointManifest, content, where=where)
    _check_file_names(manifest, where)
    return manifest


def _check_file_names(manifest: CheckpointManifest, where: str) -> None:
    """Check that files have the names of tensor files, and that all are listed.

    A checkpoint may come from an untrusted source, so a name must not lead to a file
    outside its directory.

    Raises:
        BadCheckpoint: If a name has another form, or if a tensor's file is not listed.
    """
    names = {file.name for file in manifest.files}
    if not all(_FILE_NAME.fullmatch(name) for name in names):
        raise BadCheckpoint(f"{where} refers to files in other directories")
    for entry in manifest.tensors.values():
        if any(part.file not in names for part in entry.parts):
            raise BadCheckpoint(f"{where} does not list all of its files")


def checkpoint_name(step: int, rollbacks: int) -> str:
    """Return the directory name of a checkpoint after a number of rollbacks."""
    if rollbacks == 0:
        return f"step-{step:09d}"
    return f"step-{step:09d}-rollback-{rollbacks}"


def list_checkpoints(root: Path) -> list[Path]:
    """List published checkpoints, newest first.

    A checkpoint after more rollbacks is newer, even if its step is lower.
    """
    try:
        entries = list(root.iterdir())
    except FileNotFoundError:
        return []
    rollbacks_and_step: dict[Path, tuple[int, int]] = {}
    for path in entries:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            step, rollbacks = match.groups(default="0")
            rollbacks_and_step[path] = (int(rollbacks), int(step))
    return sorted(
        rollbacks_and_step,
        key=lambda path: (rollbacks_and_step[path], path),
        reverse=True,
    )


def step_of(name: str) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(name.split("-")[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """Intact checkpoint on disk."""

    path: Path
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptCheckpoint:
    """Checkpoint on disk that cannot be used."""

    path: Path
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
    path = directory / MANIFEST_FILE
    try:
        return parse_manifest(read_json(path), str(path))
    except BadConfig as error:
        if isinstance(error.__cause__, OSError):
            raise _unreadable(directory, error.__cause__) from error
        raise BadCheckpoint(error.message) from error


def _unreadable(directory: Path, error: OSError) -> Exception:
    """Return the exception for a read error.

    Returns:
        ``BadCheckpoint`` only if a file is missing or no plain file. Any other error
        may be gone on the next try, so the checkpoint may be intact.
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
    """Return the first of the checkpoints that is marked as good; None if none is.

    Only manifests are read, not the large files that they describe.
    """
    for path in checkpoints:
        with contextlib.suppress(BadCheckpoint):
            if _read_manifest(path).state.good:
                return path
    return None


def clear_leftovers(root: Path) -> None:
    """Remove unfinished files of earlier starts of this run.

    Call it only while no other process uses the run.
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
