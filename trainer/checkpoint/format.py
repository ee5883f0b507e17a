"""Checkpoints on disk: format, writing, checking, finding and removal.

No torch here, and no pickle anywhere.

    RUN/checkpoints/
      latest                      name of the newest checkpoint, for you and scripts
      step-000000500/             named after the optimizer step; ends with
                                  `-rollback-K` after K rollbacks of the run
        rank-00000.safetensors    tensors, or parts of tensors, that this rank writes
        manifest.json             written last: size and CRC-32 of each file, location
                                  of tensor parts, training state

A checkpoint is written into a hidden directory, synced, and renamed, so every visible
one was complete. Sizes and checksums detect corruption. If several ranks write, each
describes its file in JSON for the manifest of rank 0.
"""

import contextlib
import errno
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.config.tables import StrictTable, canonical_sha256, parse_table, read_json
from trainer.data.sampler import Position
from trainer.errors import BadConfig, DiskTrouble
from trainer.files import (
    CorruptFile,
    FileEntry,
    check_file,
    sync,
    write_atomically,
    write_file,
)
from trainer.health.events import utc_now

CHECKPOINTS_DIRECTORY = "checkpoints"
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"step-(\d{9,15})(?:-rollback-(\d{1,6}))?")
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
_HASH_KEY = "content_sha256"
_POLL_S = 0.05
"""Interval at which the first writer looks for files of others, in seconds."""


class BadCheckpoint(Exception):
    """Corrupt or incomplete checkpoint; the message gives the reason."""


class Part(StrictTable):
    """Part of a tensor in one file.

    It spans ``begin`` to ``end`` (exclusive) of the first dimension; all of a scalar.
    """

    file: str
    begin: int
    end: int


class TensorEntry(StrictTable):
    """Dtype and shape of a tensor, and the files with its parts."""

    dtype: str
    """Dtype as safetensors names it, such as ``BF16``."""
    shape: list[int]
    parts: list[Part]


class TrainingState(StrictTable):
    """Training state besides tensors.

    Learning rate and dropout are not saved, as they follow from step, seed, position
    and rank.
    """

    step: int
    """Number of optimizer steps taken."""
    position: Position
    config: dict[str, Any]
    config_sha256: str
    dataset_hash: str
    world_size: int
    good: bool
    """True if loss and gradient were healthy, so that a rollback may return to this
    checkpoint."""
    health: dict[str, Any]
    """State of ``trainer.health.monitor.HealthMonitor``, as its ``to_json`` returns
    it."""
    noise_scale: list[float]
    """Smoothed signal and noise from which the gradient noise scale is computed."""
    head_overflows: int
    skipped_steps: int


class CheckpointManifest(StrictTable):
    """Content of ``manifest.json``, which on disk also contains its own hash."""

    schema_version: Literal[2]
    written_utc: str
    state: TrainingState
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]


def manifest_text(manifest: CheckpointManifest) -> str:
    """Return the content of ``manifest.json``, with its hash."""
    table = manifest.model_dump(mode="json")
    return json.dumps(table | {_HASH_KEY: canonical_sha256(table)})


def parse_manifest(table: object, where: str) -> CheckpointManifest:
    """Validate a manifest's JSON value, called ``where`` in messages.

    Raises:
        BadCheckpoint: If it was changed.
        BadConfig: If it is invalid.
    """
    if not isinstance(table, dict):
        raise BadCheckpoint(f"{where} is not a JSON object")
    content = {key: value for key, value in table.items() if key != _HASH_KEY}
    try:
        is_as_written = table.get(_HASH_KEY) == canonical_sha256(content)
    except ValueError:  # NaN, or half a character, which is never written
        is_as_written = False
    if not is_as_written:
        raise BadCheckpoint(f"{where} was modified: its hash does not match")
    manifest = parse_table(CheckpointManifest, content, where=where)
    names = {file.name for file in manifest.files}
    if not all(_FILE_NAME.fullmatch(name) for name in names):
        raise BadCheckpoint(f"{where} refers to files in other directories")
    for entry in manifest.tensors.values():
        if any(part.file not in names for part in entry.parts):
            raise BadCheckpoint(f"{where} does not list all of its files")
    return manifest


class _Share(StrictTable):
    """Description of the file that one rank has written."""

    file: FileEntry
    tensors: dict[str, TensorEntry]


def checkpoint_name(step: int, rollbacks: int) -> str:
    """Return the directory name of a checkpoint."""
    return f"step-{step:09d}" + (f"-rollback-{rollbacks}" if rollbacks else "")


def list_checkpoints(root: Path) -> list[Path]:
    """List published checkpoints, newest first.

    Those after a rollback are newer than all from before it.
    """
    ages: dict[Path, tuple[int, int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                step, rollbacks = match.groups(default="0")
                ages[path] = (int(rollbacks), int(step))
    return sorted(ages, key=lambda path: (ages[path], path), reverse=True)


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


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writer of one rank's share of a checkpoint.

    The first writer also waits for the others and publishes it.

    A writer that fails leaves a failure note for the first one, which then fails as
    well. ``attempt`` (which start of the run) and ``number`` (which save, counted the
    same on every rank) separate its files from those of earlier saves.
    """

    root: Path
    name: str
    _: KW_ONLY
    attempt: int
    rank: int
    writers: Sequence[int]
    timeout_s: float
    """Longest time that the first of ``writers`` waits for a share that does not grow,
    in seconds."""
    number: int = 1
    progressed: Callable[[], None] = lambda: None
    """Callback while data is written, by this rank or by one that it waits for."""

    @property
    def _partial(self) -> Path:
        """Hidden directory in which the checkpoint is written."""
        return (
            self.root
            / f".{self.name}.attempt-{self.attempt}.save-{self.number}.partial"
        )

    def _file_of(self, rank: int, suffix: str) -> Path:
        return self._partial / f"rank-{rank:05d}.{suffix}"

    def write(
        self, content: memoryview, tensors: dict[str, TensorEntry], state: TrainingState
    ) -> None:
        """Write this rank's file.

        On the first writer, also write the manifest and publish the checkpoint.

        Raises:
            OSError: If writing fails here or on another rank.
            TimeoutError: If another rank's share is late.
        """
        is_first = self.rank == self.writers[0]
        try:
            if is_first:
                self._remove_earlier_saves()
            self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            entry = write_file(
                self._file_of(self.rank, "safetensors"),
                content,
                progressed=self.progressed,
            )
            share = _Share(file=entry, tensors=tensors)
            if is_first:
                other_shares = [self._wait_for(rank) for rank in self.writers[1:]]
                self._publish([share, *other_shares], state)
            else:
                write_atomically(
                    self._file_of(self.rank, "json"), share.model_dump_json()
                )
        except OSError as error:
            self.give_up(error)
            raise

    def _remove_earlier_saves(self) -> None:
        """Remove files of earlier saves of this start.

        A rank may have continued to write after rank 0 gave up.
        """
        for partial in self.root.glob(f".step-*.attempt-{self.attempt}.save-*.partial"):
            if partial != self._partial:
                shutil.rmtree(partial, ignore_errors=True)

    def _publish(self, shares: Sequence[_Share], state: TrainingState) -> None:
        """Write the manifest and rename the directory to the checkpoint's name."""
        manifest = CheckpointManifest(
            schema_version=2,
            written_utc=utc_now(),
            state=state,
            files=[share.file for share in shares],
            tensors=_join_tensors(shares),
        )
        write_file(
            self._partial / MANIFEST_FILE, memoryview(manifest_text(manifest).encode())
        )
        for rank in self.writers[1:]:
            self._file_of(rank, "json").unlink()
        # Synced before it gets its name, so that every visible checkpoint is complete.
        sync(self._partial)
        final = self.root / self.name
        if final.exists():  # corrupt, as the step was repeated
            final.rename(self.root / f".{self.name}.{secrets.token_hex(4)}.replaced")
        self._partial.rename(final)
        point_to_latest(self.root, self.name)
        for replaced in self.root.glob(f".{self.name}.*.replaced"):
            shutil.rmtree(replaced, ignore_errors=True)

    def _wait_for(self, rank: int) -> _Share:
        """Wait for another rank's share, for as long as its file grows.

        Raises:
            OSError: If that rank left a failure note.
            TimeoutError: If its file does not grow for ``timeout_s``.
        """
        share = self._file_of(rank, "json")
        failure_note = self._file_of(rank, "failed")
        file = self._file_of(rank, "safetensors")
        size_bytes = -1
        last_growth_s = time.monotonic()
        while not share.is_file():
            if failure_note.is_symlink():
                raise OSError(
                    _read_failure_note(failure_note),
                    f"rank {rank} could not write its file",
                )
            now_s = time.monotonic()
            new_size_bytes = file.stat().st_size if file.is_file() else -1
            if new_size_bytes != size_bytes:
                last_growth_s = now_s
                size_bytes = new_size_bytes
                self.progressed()
            if now_s - last_growth_s > self.timeout_s:
                raise TimeoutError(
                    f"rank {rank} has not written its file within {self.timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        return parse_table(_Share, read_json(share), where=str(share))

    def give_up(self, error: Exception) -> None:
        """Remove partial files.

        If this is not the first writer, leave a failure note for it.
        """
        with contextlib.suppress(OSError):
            if self.rank == self.writers[0]:
                shutil.rmtree(self._partial, ignore_errors=True)
                return
            self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file_of(self.rank, "safetensors").unlink(missing_ok=True)
            error_number = errno.EIO
            if isinstance(error, OSError) and error.errno:
                error_number = error.errno
            # The note is a symbolic link, as one can be created on a full disk.
            self._file_of(self.rank, "failed").symlink_to(str(error_number))


def _join_tensors(shares: Sequence[_Share]) -> dict[str, TensorEntry]:
    """Return the entry of every tensor, with its parts from all shares in order."""
    tensors: dict[str, TensorEntry] = {}
    for share in shares:
        for name, entry in share.tensors.items():
            parts = list(entry.parts)
            if name in tensors:
                parts = [*tensors[name].parts, *parts]
            parts.sort(key=lambda part: part.begin)
            tensors[name] = entry.model_copy(update={"parts": parts})
    return tensors


def _read_failure_note(note: Path) -> int:
    """Return the error number that a writer left; EIO if it cannot be read."""
    try:
        return int(note.readlink().name)
    except (OSError, ValueError):
        return errno.EIO


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

    A checkpoint is corrupt only if a file is missing or not a plain file.
    """
    path = error.filename or directory
    message = f"cannot read {path}: {error.strerror or error}"
    is_missing = isinstance(
        error, FileNotFoundError | NotADirectoryError | IsADirectoryError
    )
    if is_missing or error.errno == errno.ELOOP:
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
    """Find the newest intact checkpoint.

    Args:
        root: Directory of a run's checkpoints.
        only_good: Whether to skip checkpoints that are not marked as good.

    Returns:
        The checkpoint, None if there is none, and the corrupt ones that are newer.
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
        The names of those removed.

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
    for path in checkpoints:
        # Only the manifest is read, not the large files that it describes.
        with contextlib.suppress(BadCheckpoint):
            if _read_manifest(path).state.good:
                kept.add(path)
                break
    removed = [path for path in checkpoints if path not in kept]
    for path in removed:
        # Renamed first, so that a partly removed checkpoint does not look corrupt.
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return [path.name for path in removed]


def clear_leftovers(root: Path) -> None:
    """Remove unfinished files of earlier starts of this run.

    Call it only while no other process uses the run.
    """
    for pattern in (".step-*.partial", ".step-*.removed", ".step-*.replaced"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def point_to_latest(root: Path, name: str) -> None:
    """Write a checkpoint's name to ``latest``.

    Errors are ignored, as training does not read it.
    """
    with contextlib.suppress(OSError):
        write_atomically(root / "latest", f"{name}\n")
