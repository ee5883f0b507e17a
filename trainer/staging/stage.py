"""Staging of a dataset on a node's local disk.

The first process of a node copies the dataset, the others wait. ``staging_directory``
documents the files on the local disk.
"""

import os
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.resolve import ResolvedConfig
from trainer.formats.errors import BadConfig, UnreadableFile, unreadable
from trainer.formats.file_locks import LockHeld, locked
from trainer.formats.files import sync
from trainer.formats.manifest import read_manifest
from trainer.formats.progress import Update
from trainer.formats.train_config import STAGING_TIMEOUT_S
from trainer.staging.copying import (
    CopyFigures,
    copy_files,
    dataset_files,
    is_intact,
)
from trainer.staging.read_speed import seconds_per_sample
from trainer.staging.staging_directory import StagingDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Dataset on a local disk, and the cost of its copy."""

    directory: Path
    dataset_hash: str
    samples: int
    """Number of samples in the training split."""
    copied: CopyFigures | None = None
    """Size and times of the copy; None if it existed already, or another rank copied
    it."""
    source_s_per_sample: float | None = None
    """Mean time of one reader for a random sample of the source, in seconds; None if
    nothing was copied."""
    local_s_per_sample: float | None = None
    """Mean time of one reader for a random sample of the copy, in seconds; None if
    nothing was copied."""

    @property
    def break_even_epochs(self) -> float | None:
        """Number of epochs after which the copy has saved its own time.

        None if never, or if not measured.
        """
        if (
            self.copied is None
            or self.source_s_per_sample is None
            or self.local_s_per_sample is None
        ):
            return None
        saved_s_per_sample = self.source_s_per_sample - self.local_s_per_sample
        saved_s_per_epoch = self.samples * saved_s_per_sample
        if saved_s_per_epoch <= 0:
            return None
        return self.copied.seconds / saved_s_per_epoch


def stage(
    source: Path,
    local: Path,
    *,
    timeout_s: float = STAGING_TIMEOUT_S,
    update: Update = lambda done, total, note: None,
) -> Staged:
    """Copy a dataset to the local disk, unless it is there already.

    All ranks of a node call this function, and one of them copies. If that is killed,
    the next one does.

    Args:
        source: Directory of the dataset.
        local: Directory on the local disk.
        timeout_s: Longest wait for the rank that copies, in seconds.
        update: Progress callback, in bytes.

    Raises:
        BadConfig: If the source is corrupt, writing to the local disk fails, or the
            wait exceeds ``timeout_s``.
    """
    manifest = read_manifest(source)
    staging = StagingDirectory(local, manifest)
    staged = Staged(
        directory=staging.directory,
        dataset_hash=manifest.dataset_hash,
        samples=manifest.train.samples,
    )
    with staging.writing():
        staging.prepare()
        try:
            with locked(staging.lock, timeout_s):
                if is_intact(staging.directory, manifest):
                    return staged
                return _copy(staging, source, staged, update)
        except LockHeld as error:
            raise BadConfig(
                f"another process is still copying this dataset to {staging.root} after"
                f" {timeout_s:g} s",
                next_step="Check that process, or wait longer.",
            ) from error


def _copy(
    staging: StagingDirectory, source: Path, staged: Staged, update: Update
) -> Staged:
    """Copy a dataset under its lock, and measure the copy and its source."""
    staging.clear()
    files = dataset_files(source, staging.manifest)
    staging.check_room(files)
    source_s_per_sample = _measure_source(source)
    partial = staging.new_partial()
    with staging.writing(files):
        try:
            partial.mkdir(mode=0o700)  # inside the block, as Ctrl-C may come at once
            figures = copy_files(files, source, partial, staging.manifest, update)
            partial.rename(staging.directory)
            sync(staging.root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return replace(
        staged,
        copied=figures,
        source_s_per_sample=source_s_per_sample,
        local_s_per_sample=seconds_per_sample(staging.directory),
    )


def _measure_source(source: Path) -> float | None:
    """Return the mean time to read a sample of the source, in seconds.

    Raises:
        BadConfig: If the source cannot be read.
    """
    next_step = f"The source is corrupt. Find all faults: autotune data verify {source}"
    try:
        return seconds_per_sample(source)
    except UnreadableFile:
        raise
    except BadConfig as error:
        raise BadConfig(error.message, next_step=next_step) from error
    except OSError as error:
        cannot_read = unreadable(source, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise BadConfig(
            f"cannot read {source}: {error.strerror or error}", next_step=next_step
        ) from error


def stage_data(
    resolved: ResolvedConfig,
    environment: Mapping[str, str] = os.environ,
    update: Update = lambda done, total, note: None,
) -> ResolvedConfig:
    """Return the configuration, its dataset staged if ``stage_to`` is set.

    Raises:
        BadConfig: As ``stage`` does.
    """
    stage_to = resolved.config.data.stage_to
    if stage_to is None:
        return resolved
    try:
        local = Path(string.Template(stage_to).substitute(environment))
    except (KeyError, ValueError) as error:
        raise BadConfig(
            f"train.data.stage_to = {stage_to!r}: environment variable {error} is not"
            " set",
            next_step="Set it, or pass a directory: --set train.data.stage_to=/local",
        ) from error
    staged = stage(resolved.data_dir, local, update=update)
    return replace(resolved, data_dir=staged.directory)
