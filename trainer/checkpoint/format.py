"""Format of checkpoints on disk: their names and files, and the manifest.

``checkpoint_writer`` writes them, and ``stored_checkpoints`` finds and reads them. No
torch here, and no pickle anywhere.

    RUN/checkpoints/
      latest                      name of the newest checkpoint, for you and scripts
      step-000000500/             named after the optimizer step; ends with
                                  `-rollback-K` after K rollbacks of the run
        rank-00000.safetensors    tensors, or parts of tensors, that this rank writes
        manifest.json             written last: size and CRC-32 of each file, location
                                  of tensor parts, training state

A checkpoint is written into a hidden directory, synced, and renamed, so every visible
one was complete. Sizes and checksums detect corruption. Names of hidden directories
begin with a dot and that of the checkpoint, and end with ``.partial`` while they are
written, and with ``.replaced`` or ``.removed`` before they are deleted.
"""

import json
import re
from typing import Any, Literal

from trainer.data.position import Position
from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.files import FileEntry
from trainer.formats.tables import StrictTable, parse_table

CHECKPOINTS_DIRECTORY = "checkpoints"
"""Name of the directory of checkpoints in a run directory."""
MANIFEST_FILE = "manifest.json"
# Numbers are padded, so that names sort by them; large ones may exceed the padding.
CHECKPOINT_NAME = re.compile(r"step-(\d{9,15})(?:-rollback-(\d{1,6}))?")
"""Name of a published checkpoint. Its groups are the optimizer step, and the number of
rollbacks if there were any."""
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
    """Times so far that a micro-batch of rank 0 exceeded fixed slots or segments."""
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


def step_of(name: str) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(name.split("-")[1])
