"""Writing of a checkpoint by all ranks that hold a part of it.

Each rank writes its share: a file of tensors in a hidden directory, and a description
of it in JSON. The first of the writing ranks writes the manifest instead, once it has
the descriptions of the others, and renames the directory.
``trainer.checkpoint.format`` documents the files. No torch here.
"""

import contextlib
import errno
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from trainer.checkpoint.format import (
    MANIFEST_FILE,
    CheckpointManifest,
    Part,
    TensorEntry,
    TrainingState,
    manifest_text,
)
from trainer.checkpoint.stored_checkpoints import point_to_latest
from trainer.formats.events import utc_now
from trainer.formats.files import FileEntry, sync, write_atomically, write_file
from trainer.formats.tables import StrictTable, parse_table, read_json

_POLL_S = 0.05
"""Interval at which the first writer looks for the files of other ranks, in seconds."""


class _Share(StrictTable):
    """Description of the file that one rank has written."""

    file: FileEntry
    tensors: dict[str, TensorEntry]
    """Tensors of the file by name; each has a single part."""


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes one rank's share of a checkpoint; the first writer also publishes it.

    A writer that fails leaves a failure note for the first one, which then fails as
    well, so a published checkpoint has the shares of all ranks. The hidden directory is
    named after ``attempt`` and ``save_number``, so files of earlier saves are not
    mistaken for those of this one.
    """

    root: Path
    """Directory of the run's checkpoints."""
    name: str
    """Name of the checkpoint."""
    _: KW_ONLY
    attempt: int
    """Number of this start of the run, counted from 1."""
    rank: int
    """Rank whose share is written."""
    writing_ranks: Sequence[int]
    """Ranks that write a share, in ascending order."""
    timeout_s: float
    """Longest time that the first writer waits for a share that does not grow, in
    seconds."""
    save_number: int = 1
    """Number of this save, counted from 1 and the same on every rank."""
    progressed: Callable[[], None] = lambda: None
    """Callback while data is written, by this rank or by one that it waits for."""

    @property
    def _is_first(self) -> bool:
        """True on the writer that publishes the checkpoint."""
        return self.rank == self.writing_ranks[0]

    @property
    def _partial(self) -> Path:
        """Hidden directory in which the checkpoint is written."""
        return (
            self.root
            / f".{self.name}.attempt-{self.attempt}.save-{self.save_number}.partial"
        )

    def _tensor_file(self, rank: int) -> Path:
        """Return the path of a rank's file of tensors."""
        return self._partial / f"rank-{rank:05d}.safetensors"

    def _description(self, rank: int) -> Path:
        """Return the path of the description of a rank's share, as JSON."""
        return self._partial / f"rank-{rank:05d}.json"

    def _failure_note(self, rank: int) -> Path:
        """Return the path of a rank's failure note.

        The note is a symbolic link to the error number of the failure, as a link can be
        created on a full disk.
        """
        return self._partial / f"rank-{rank:05d}.failed"

    def write(
        self, content: memoryview, tensors: dict[str, TensorEntry], state: TrainingState
    ) -> None:
        """Write this rank's share; on the first writer, then publish the checkpoint.

        If it fails, this writer has also given up, as ``give_up`` documents.

        Args:
            content: Content of this rank's file.
            tensors: Tensors of the file by name, each with a single part.
            state: State besides tensors, which the first writer writes.

        Raises:
            OSError: If writing fails here or on another rank.
            TimeoutError: If another rank's share is late.
            BadConfig: If another rank's description is invalid.
        """
        try:
            if self._is_first:
                self._remove_earlier_saves()
            self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            share = self._write_tensors(content, tensors)
            if self._is_first:
                other_shares = [self._wait_for(rank) for rank in self.writing_ranks[1:]]
                self._publish([share, *other_shares], state)
            else:
                write_atomically(self._description(self.rank), share.model_dump_json())
        except Exception as error:
            self.give_up(error)
            raise

    def _remove_earlier_saves(self) -> None:
        """Remove files of this start's earlier saves.

        Another rank may have continued to write after the first writer gave up.
        """
        for partial in self.root.glob(f".step-*.attempt-{self.attempt}.save-*.partial"):
            if partial != self._partial:
                shutil.rmtree(partial, ignore_errors=True)

    def _write_tensors(
        self, content: memoryview, tensors: dict[str, TensorEntry]
    ) -> _Share:
        """Write this rank's file of tensors, and return its description."""
        entry = write_file(
            self._tensor_file(self.rank), content, progressed=self.progressed
        )
        return _Share(file=entry, tensors=tensors)

    def _wait_for(self, rank: int) -> _Share:
        """Wait for another rank's share, for as long as its file grows.

        Raises:
            OSError: If that rank left a failure note.
            TimeoutError: If its file does not grow for ``timeout_s``.
            BadConfig: If its description is invalid.
        """
        description = self._description(rank)
        file = self._tensor_file(rank)
        size_bytes: int | None = None
        last_growth_s = time.monotonic()
        while not description.is_file():
            self._check_failure_note(rank)
            now_s = time.monotonic()
            new_size_bytes = file.stat().st_size if file.is_file() else None
            if new_size_bytes != size_bytes:
                last_growth_s = now_s
                size_bytes = new_size_bytes
                self.progressed()
            if now_s - last_growth_s > self.timeout_s:
                raise TimeoutError(
                    f"rank {rank} has not written its file within {self.timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        return parse_table(_Share, read_json(description), where=str(description))

    def _check_failure_note(self, rank: int) -> None:
        """Raise ``OSError`` if another rank left a failure note."""
        failure_note = self._failure_note(rank)
        if failure_note.is_symlink():
            raise OSError(
                _read_failure_note(failure_note),
                f"rank {rank} could not write its file",
            )

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
        for rank in self.writing_ranks[1:]:
            self._description(rank).unlink()
        # Synced before it gets its name, so that every visible checkpoint is complete.
        sync(self._partial)
        final = self.root / self.name
        if final.exists():  # corrupt, as training would have resumed from an intact one
            final.rename(self.root / f".{self.name}.{secrets.token_hex(4)}.replaced")
        self._partial.rename(final)
        point_to_latest(self.root, self.name)
        for replaced in self.root.glob(f".{self.name}.*.replaced"):
            shutil.rmtree(replaced, ignore_errors=True)

    def give_up(self, error: Exception) -> None:
        """Remove partial files, and tell the first writer that this rank has failed.

        The first writer removes the whole hidden directory. Any other one removes its
        own file, and leaves a failure note. If that fails too, the first writer waits
        for this rank until ``timeout_s``.

        Args:
            error: Error of this rank. The failure note has its number, or that of a
                failed disk if it has none.
        """
        with contextlib.suppress(OSError):
            if self._is_first:
                shutil.rmtree(self._partial, ignore_errors=True)
                return
            self._partial.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tensor_file(self.rank).unlink(missing_ok=True)
            error_number = errno.EIO
            if isinstance(error, OSError) and error.errno:
                error_number = error.errno
            self._failure_note(self.rank).symlink_to(str(error_number))


def _read_failure_note(note: Path) -> int:
    """Return the error number in a failure note; EIO if it cannot be read."""
    try:
        return int(note.readlink().name)
    except (OSError, ValueError):
        return errno.EIO


def _join_tensors(shares: Sequence[_Share]) -> dict[str, TensorEntry]:
    """Return the entry of every tensor, with its parts of all shares.

    Parts are in the order of their positions in the tensor.
    """
    entries: dict[str, TensorEntry] = {}
    parts_by_name: dict[str, list[Part]] = {}
    for share in shares:
        for name, entry in share.tensors.items():
            entries[name] = entry
            parts_by_name.setdefault(name, []).extend(entry.parts)
    for name, parts in parts_by_name.items():
        parts.sort(key=lambda part: part.begin)
        entries[name] = entries[name].model_copy(update={"parts": parts})
    return entries
