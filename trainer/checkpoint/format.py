"""Checkpoints on disk: how they are written, checked, found and removed. No torch here, and no pickle anywhere.

RUN/checkpoints/
  latest                        the name of the newest, for people and scripts
  step-000000500/               named for the optimizer step; `-rollback-K` follows after K rollbacks of the run
    rank-00000.safetensors      tensors, or parts of them, that this rank keeps
    manifest.json               written last: files with size and CRC-32, where the parts of tensors lie, the state

A checkpoint is written into a hidden directory, synced, and renamed: what has its name is whole. Sizes and checksums
tell whether it still is. If several ranks write, each leaves a description of its file for the first rank's manifest.
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
from trainer.files import DamagedFile, FileEntry, check_file, sync, write_atomically, write_file
from trainer.health.events import utc_now

MANIFEST_FILE = "manifest.json"
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
_HASH_KEY = "content_sha256"


class BadCheckpoint(Exception):
    """A checkpoint is damaged or incomplete; the message says what is wrong."""


class Part(StrictTable):
    """A part of a tensor: rows ``begin`` to ``end`` of its first dimension, or all of it."""

    file: str
    begin: int
    end: int


class TensorEntry(StrictTable):
    """A tensor and where its parts lie."""

    dtype: str
    """As safetensors names it."""
    shape: list[int]
    parts: list[Part]


class TrainingState(StrictTable):
    """What is not a tensor.

    The learning rate follows from ``step`` and ``health``, dropout from the seed, the position and the rank.
    """

    step: int
    """Optimizer steps taken."""
    position: Position
    config: dict[str, Any]
    config_sha256: str
    dataset_hash: str
    world_size: int
    good: bool
    """Whether loss and gradient were fine: what a rollback may return to."""
    health: dict[str, Any]
    """The monitors' memory, as ``trainer.health.monitor`` writes it."""
    noise_scale: list[float]
    """Smoothed signal and noise of the gradient noise scale."""
    head_overflows: int
    skipped_steps: int


class CheckpointManifest(StrictTable):
    """``manifest.json``; on disk with a hash of itself."""

    schema_version: Literal[2]
    written_utc: str
    state: TrainingState
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]


def manifest_text(manifest: CheckpointManifest) -> str:
    """Return the manifest as it lies on disk."""
    table = manifest.model_dump(mode="json")
    return json.dumps(table | {_HASH_KEY: canonical_sha256(table)})


def parse_manifest(table: object, where: str) -> CheckpointManifest:
    """Check a manifest's JSON value; raise ``BadCheckpoint`` if it is not as it was written."""
    if not isinstance(table, dict):
        raise BadCheckpoint(f"{where} is not a table")
    content = {key: value for key, value in table.items() if key != _HASH_KEY}
    try:
        as_written = table.get(_HASH_KEY) == canonical_sha256(content)
    except ValueError:  # NaN, or half a character: nothing that was ever written
        as_written = False
    if not as_written:
        raise BadCheckpoint(f"{where} is not as it was written")
    try:
        manifest = parse_table(CheckpointManifest, content, where=where)
    except BadConfig as error:
        raise BadCheckpoint(error.message) from error
    names = {file.name for file in manifest.files}
    if not all(_FILE_NAME.fullmatch(name) for name in names):
        raise BadCheckpoint(f"{where} names files elsewhere")
    if any(part.file not in names for entry in manifest.tensors.values() for part in entry.parts):
        raise BadCheckpoint(f"{where} does not list all of its files")
    return manifest


CHECKPOINTS_DIRECTORY = "checkpoints"
_NAME = re.compile(r"step-(\d{9,15})(?:-rollback-(\d{1,6}))?")
_POLL_S = 0.05


class _Share(StrictTable):
    """What one rank has written."""

    file: FileEntry
    tensors: dict[str, TensorEntry]


def checkpoint_name(step: int, rollbacks: int) -> str:
    """Name a checkpoint's directory."""
    return f"step-{step:09d}" + (f"-rollback-{rollbacks}" if rollbacks else "")


def list_checkpoints(root: Path) -> list[Path]:
    """List the whole ones by name, newest first: what was written after a rollback is newer than what was before."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append(((int(match[2] or 0), int(match[1])), path))
    return [path for _, path in sorted(found, reverse=True)]


def step_of(name: str) -> int:
    """Return the optimizer step in a checkpoint's name."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes one rank's share of a checkpoint; the first rank's call ends when the whole is there.

    A writer that fails leaves word of it for the first one, which then gives up as well. ``attempt`` (the run's start)
    and ``number`` (the save, counted by every rank alike) tell its files from those of earlier ones.
    """

    root: Path
    name: str
    _: KW_ONLY
    attempt: int
    rank: int
    writers: Sequence[int]
    timeout_s: float
    """Longest wait of the first of ``writers`` for a share that does not grow."""
    number: int = 1
    progressed: Callable[[], None] = lambda: None
    """Called while something is written, by this rank or by one that it waits for."""

    @property
    def _partial(self) -> Path:
        return self.root / f".{self.name}.attempt-{self.attempt}.save-{self.number}.partial"

    def _of_rank(self, rank: int, ending: str) -> Path:
        return self._partial / f"rank-{rank:05d}.{ending}"

    def write(self, content: memoryview, tensors: dict[str, TensorEntry], state: TrainingState) -> None:
        """Write this rank's file, and on the first rank the manifest of all, and publish.

        Raises ``OSError`` if the disk refuses, ``TimeoutError`` if another rank's share did not come.
        """
        try:
            if self.rank == self.writers[0]:
                # What earlier saves of this start left: a rank may have written on after the first gave up.
                for partial in self.root.glob(f".step-*.attempt-{self.attempt}.save-*.partial"):
                    if partial != self._partial:
                        shutil.rmtree(partial, ignore_errors=True)
            self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            entry = write_file(self._of_rank(self.rank, "safetensors"), content, progressed=self.progressed)
            share = _Share(file=entry, tensors=tensors)
            if self.rank != self.writers[0]:
                write_atomically(self._of_rank(self.rank, "json"), share.model_dump_json())
                return
            self._publish([share, *(self._wait_for(rank) for rank in self.writers[1:])], state)
        except OSError as error:
            self.give_up(error)
            raise

    def _publish(self, shares: Sequence[_Share], state: TrainingState) -> None:
        tensors: dict[str, TensorEntry] = {}
        for name, entry in (item for share in shares for item in share.tensors.items()):
            parts = [*(tensors[name].parts if name in tensors else []), *entry.parts]
            tensors[name] = entry.model_copy(update={"parts": sorted(parts, key=lambda part: part.begin)})
        files = [one.file for one in shares]
        manifest = CheckpointManifest(
            schema_version=2, written_utc=utc_now(), state=state, files=files, tensors=tensors
        )
        write_file(self._partial / MANIFEST_FILE, memoryview(manifest_text(manifest).encode()))
        for rank in self.writers[1:]:
            self._of_rank(rank, "json").unlink()
        sync(self._partial)
        final = self.root / self.name
        if final.exists():  # damaged, or this step would not have been taken again
            final.rename(self.root / f".{self.name}.{secrets.token_hex(4)}.replaced")
        self._partial.rename(final)
        point_to_latest(self.root, self.name)
        for replaced in self.root.glob(f".{self.name}.*.replaced"):
            shutil.rmtree(replaced, ignore_errors=True)

    def _wait_for(self, rank: int) -> _Share:
        share, failed, file = (self._of_rank(rank, ending) for ending in ("json", "failed", "safetensors"))
        grown_s, size = time.monotonic(), -1
        while not share.is_file():
            if failed.is_symlink():
                number = errno.EIO
                with contextlib.suppress(OSError, ValueError):
                    number = int(failed.readlink().name)
                raise OSError(number, f"rank {rank} could not write its share")
            now_s, now_size = time.monotonic(), file.stat().st_size if file.is_file() else -1
            if now_size != size:
                grown_s, size = now_s, now_size
                self.progressed()
            if now_s - grown_s > self.timeout_s:
                raise TimeoutError(f"rank {rank} has not written its share within {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        return parse_table(_Share, read_json(share), where=str(share))

    def give_up(self, error: Exception) -> None:
        """Leave nothing behind or, if another rank leads, the word that this one failed."""
        with contextlib.suppress(OSError):
            if self.rank == self.writers[0]:
                shutil.rmtree(self._partial, ignore_errors=True)
            else:
                self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._of_rank(self.rank, "safetensors").unlink(missing_ok=True)
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                # A name needs no room on a full disk, as what is in a file would.
                self._of_rank(self.rank, "failed").symlink_to(str(number))


def read_checkpoint(directory: Path) -> CheckpointManifest:
    """Read a checkpoint's manifest and check all of its files, size and content.

    Raises:
        BadCheckpoint: If anything is not there, or not as it was written.
        DiskTrouble: If it cannot be read at the moment, which says nothing about it.
        BadConfig: If this user may not read it.
    """
    manifest = _read_manifest(directory)
    try:
        for file in manifest.files:
            check_file(directory / file.name, file)
    except DamagedFile as error:
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
    """What a file system's refusal means: only that a file is not there says that a checkpoint is damaged."""
    message = f"{directory} cannot be read: {error.strerror or error}"
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError) or error.errno == errno.ELOOP:
        return BadCheckpoint(message)
    if isinstance(error, PermissionError):
        return BadConfig(message, next_step="Start as the user who wrote it, or let this one read it.")
    return DiskTrouble(
        message,
        next_step="Nothing was changed. Start again when the file system is well: it goes on from that checkpoint.",
    )


Found = tuple[Path, CheckpointManifest]


def newest_checkpoint(root: Path, *, good: bool = False) -> tuple[Found | None, list[tuple[Path, str]]]:
    """Return the newest whole checkpoint or None, and each damaged one that was passed over, with what is wrong.

    With ``good`` only such count as a rollback may return to.
    """
    damaged: list[tuple[Path, str]] = []
    for path in list_checkpoints(root):
        try:
            manifest = read_checkpoint(path)
        except BadCheckpoint as error:
            damaged.append((path, str(error)))
            continue
        if manifest.state.good or not good:
            return (path, manifest), damaged
    return None, damaged


def prune(root: Path, *, keep_last: int, keep_every_steps: int | None) -> list[str]:
    """Remove old checkpoints, but never the newest good one; return the names of those removed.

    Raises ``DiskTrouble`` if it cannot be told which one that is, ``OSError`` if they cannot be removed.
    """
    checkpoints = list_checkpoints(root)
    kept = set(checkpoints[:keep_last])
    kept.update(path for path in checkpoints if keep_every_steps and step_of(path.name) % keep_every_steps == 0)
    for path in checkpoints:
        with contextlib.suppress(BadCheckpoint):
            if _read_manifest(path).state.good:
                kept.add(path)
                break
    removed = [path for path in checkpoints if path not in kept]
    for path in removed:
        # Renamed first: a half removed checkpoint must not be taken for a damaged one.
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.removed")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return [path.name for path in removed]


def clear_leftovers(root: Path) -> None:
    """Remove what earlier starts of this run left unfinished; only while no other process uses the run."""
    for pattern in (".step-*.partial", ".step-*.removed", ".step-*.replaced"):
        for path in root.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def point_to_latest(root: Path, name: str) -> None:
    """Let ``latest`` name a checkpoint, if the disk lets it: it is only for people."""
    with contextlib.suppress(OSError):
        write_atomically(root / "latest", f"{name}\n")
