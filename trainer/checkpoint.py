"""Checkpoints on disk: how they are written, checked, found and removed. No torch here, and no pickle anywhere.

RUN/checkpoints/
  latest                        the name of the newest, for people and scripts
  step-000000500/               named for the optimizer step; `-rollback-K` follows after K rollbacks of the run
    rank-00000.safetensors      tensors, or parts of them, that this rank keeps
    manifest.json               written last: files with size and CRC-32, where the parts of tensors lie, the state

A checkpoint is written into a hidden directory, synced, and renamed: what has its name is whole. Whether it still is
when it is read, sizes and checksums say. Where several ranks write, each leaves a description of its file beside it,
and the first rank makes the manifest of them.
"""

import contextlib
import errno
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer.disk import DamagedFile, FileEntry, check_file, sync, write_atomically, write_file
from trainer.errors import BadConfig, DiskTrouble
from trainer.schema import Table, canonical_sha256, parse_table, read_json
from trainer.stream import Position

MANIFEST_FILE = "manifest.json"
CHECKPOINT_SCHEMA_VERSION: Literal[1] = 1
_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
_HASH_KEY = "content_sha256"


class BadCheckpoint(Exception):
    """A checkpoint is damaged or incomplete; the message says what is wrong."""


class Part(Table):
    """A part of a tensor: rows ``begin`` to ``end`` of its first dimension, or all of it."""

    file: str
    begin: int
    end: int


class TensorEntry(Table):
    """A tensor and where its parts lie."""

    dtype: str
    """As safetensors names it."""
    shape: list[int]
    parts: list[Part]


class TrainingState(Table):
    """What is not a tensor.

    The learning rate follows from the step and from ``health``, dropout from the seed, the position and the rank; so
    schedule and random numbers need no more than this.
    """

    step: int
    """Optimizer steps taken."""
    position: Position
    config: dict[str, Any]
    """The configuration that led here."""
    config_sha256: str
    dataset_hash: str
    world_size: int
    good: bool
    """Whether nothing was wrong with loss and gradient: what a rollback may return to."""
    health: dict[str, Any]
    """The monitors' memory, as ``trainer.health`` writes it."""
    noise_scale: list[float]
    """Smoothed signal and noise of the gradient noise scale."""
    head_overflows: int
    skipped_steps: int


class CheckpointManifest(Table):
    """``manifest.json``; on disk with a hash of itself."""

    schema_version: Literal[1]
    written_utc: str
    state: TrainingState
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]


def manifest_text(manifest: CheckpointManifest) -> str:
    """As it lies on disk."""
    table = manifest.model_dump(mode="json")
    return json.dumps(table | {_HASH_KEY: canonical_sha256(table)})


def parse_manifest(table: object, where: str) -> CheckpointManifest:
    """A manifest from its JSON value.

    Raises:
        BadCheckpoint: If it is not one, or not as it was written.
    """
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


CHECKPOINTS_DIRECTORY, LATEST_FILE = "checkpoints", "latest"
_NAME = re.compile(r"step-(\d{9,15})(?:-rollback-(\d{1,6}))?")
_POLL_S = 0.05


class _Share(Table):
    """What one rank has written."""

    file: FileEntry
    tensors: dict[str, TensorEntry]


def checkpoint_name(step: int, rollbacks: int) -> str:
    """The directory's name."""
    return f"step-{step:09d}" + (f"-rollback-{rollbacks}" if rollbacks else "")


def list_checkpoints(root: Path) -> list[Path]:
    """Whole ones by their names, newest first: what was written after a rollback is newer than what was before."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and not path.is_symlink():
                found.append(((int(match[2] or 0), int(match[1])), path))
    return [path for _, path in sorted(found, reverse=True)]


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint's name tells."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


class CheckpointWriter:
    """Writes one rank's share of a checkpoint; the first rank's call ends when the whole is there.

    A writer that fails leaves word of it for the first one, which then gives up as well.

    ``attempt`` (the run's start) and ``number`` (the save, counted by every rank alike) keep what an earlier one left
    from being taken for this one's. The first of ``writers`` waits ``timeout_s`` for a share that does not grow.
    ``progressed`` is called now and then as long as something is written, by this rank or by one that it waits for.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        attempt: int,
        rank: int,
        writers: Sequence[int],
        timeout_s: float,
        number: int = 1,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self.name, self._rank, self._writers = root, name, rank, writers
        self._timeout_s, self._progressed = timeout_s, progressed
        self._of_this_start = f".step-*.attempt-{attempt}.save-*.partial"
        self._partial = root / f".{name}.attempt-{attempt}.save-{number}.partial"

    def write(self, content: memoryview, tensors: dict[str, TensorEntry], state: TrainingState, utc: str) -> None:
        """Write this rank's file, and on the first rank the manifest of all, and publish.

        Raises:
            OSError: If the disk or a quota is full, or anything else is wrong with it.
            TimeoutError: If another rank's share did not come.
        """
        try:
            if self._leads:
                # What earlier saves of this start left: a rank may have written on after the first gave up.
                for partial in self._root.glob(self._of_this_start):
                    if partial != self._partial:
                        shutil.rmtree(partial, ignore_errors=True)
            self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            entry = write_file(self._partial / f"{_stem(self._rank)}.safetensors", content, progressed=self._progressed)
            share = _Share(file=entry, tensors=tensors)
            if not self._leads:
                write_atomically(self._partial / f"{_stem(self._rank)}.json", share.model_dump_json())
                return
            shares = [share, *(self._wait_for(rank) for rank in self._writers[1:])]
            manifest = CheckpointManifest(
                schema_version=CHECKPOINT_SCHEMA_VERSION,
                written_utc=utc,
                state=state,
                files=[one.file for one in shares],
                tensors=_joined(shares),
            )
            self._publish(manifest)
        except OSError as error:
            self.give_up(error)
            raise

    @property
    def _leads(self) -> bool:
        return self._rank == self._writers[0]

    def _publish(self, manifest: CheckpointManifest) -> None:
        write_file(self._partial / MANIFEST_FILE, memoryview(manifest_text(manifest).encode()))
        for rank in self._writers[1:]:
            (self._partial / f"{_stem(rank)}.json").unlink()
        sync(self._partial)
        final = self._root / self.name
        if final.exists():  # damaged, or this step would not have been taken again
            final.rename(self._root / f".{self.name}.{secrets.token_hex(4)}.replaced")
        self._partial.rename(final)
        with contextlib.suppress(OSError):  # it is only for people, and the disk may be full now
            point_to_latest(self._root, self.name)
        for replaced in self._root.glob(f".{self.name}.*.replaced"):
            shutil.rmtree(replaced, ignore_errors=True)

    def _wait_for(self, rank: int) -> _Share:
        share, failed, file = (self._partial / f"{_stem(rank)}{end}" for end in (".json", ".failed", ".safetensors"))
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
                self._progressed()
            if now_s - grown_s > self._timeout_s:
                raise TimeoutError(f"rank {rank} has not written its share within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        return parse_table(_Share, read_json(share), where=str(share))

    def give_up(self, error: Exception) -> None:
        """Leave nothing behind, or, where others write as well, the word that it failed."""
        with contextlib.suppress(OSError):
            if self._leads:
                shutil.rmtree(self._partial, ignore_errors=True)
            else:
                self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
                (self._partial / f"{_stem(self._rank)}.safetensors").unlink(missing_ok=True)
                number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
                # A name needs no room on a full disk, as what is in a file would.
                (self._partial / f"{_stem(self._rank)}.failed").symlink_to(str(number))


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def _joined(shares: Sequence[_Share]) -> dict[str, TensorEntry]:
    """The tensors of all ranks, their parts in order."""
    joined: dict[str, TensorEntry] = {}
    for share in shares:
        for name, entry in share.tensors.items():
            known = joined.get(name)
            parts = sorted([*(known.parts if known else []), *entry.parts], key=lambda part: part.begin)
            joined[name] = entry.model_copy(update={"parts": parts})
    return joined


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


def newest_checkpoint(
    root: Path, *, damaged: Callable[[Path, str], None], good: bool = False
) -> tuple[Path, CheckpointManifest] | None:
    """The newest whole checkpoint, or None.

    ``damaged`` is told of each that had to be passed over; with ``good`` only such count as a rollback may return to.
    """
    for path in list_checkpoints(root):
        try:
            manifest = read_checkpoint(path)
        except BadCheckpoint as error:
            damaged(path, str(error))
            continue
        if manifest.state.good or not good:
            return path, manifest
    return None


def prune(root: Path, *, keep_last: int, keep_every_steps: int | None) -> list[str]:
    """Remove old checkpoints; the newest good one stays in any case.

    Returns:
        The names of those that were removed.

    Raises:
        DiskTrouble: If it cannot be told which one that is.
        OSError: If they cannot be removed.
    """
    checkpoints = list_checkpoints(root)
    kept = set(checkpoints[:keep_last])
    kept.update(path for path in checkpoints if keep_every_steps and step_of(path) % keep_every_steps == 0)
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
    """Let ``latest`` name a checkpoint."""
    write_atomically(root / LATEST_FILE, f"{name}\n")
