"""What a checkpoint says of itself: its files, where the parts of tensors lie, and all that is not a tensor."""

import json
import re
from typing import Any, Literal

from trainer.disk import FileEntry
from trainer.errors import BadConfig
from trainer.schema import Table, canonical_sha256, parse_table
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


class PositionEntry(Table):
    """Where the job is in its data."""

    steps: int
    rows: int
    lanes: list[int]

    def position(self) -> Position:
        """As streams take it."""
        return Position(steps=self.steps, rows=self.rows, lanes=tuple(self.lanes))


class TrainingState(Table):
    """What is not a tensor.

    The learning rate follows from the step and from ``health``, dropout from the seed, the position and the rank; so
    schedule and random numbers need no more than this.
    """

    step: int
    """Optimizer steps taken."""
    position: PositionEntry
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


class Manifest(Table):
    """``manifest.json``; on disk with a hash of itself."""

    schema_version: Literal[1]
    written_utc: str
    state: TrainingState
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]


def manifest_text(manifest: Manifest) -> str:
    """As it lies on disk."""
    table = manifest.model_dump(mode="json")
    return json.dumps(table | {_HASH_KEY: canonical_sha256(table)})


def parse_manifest(table: object, where: str) -> Manifest:
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
        manifest = parse_table(Manifest, content, where=where)
    except BadConfig as error:
        raise BadCheckpoint(error.message) from error
    names = {file.name for file in manifest.files}
    if not all(_FILE_NAME.fullmatch(name) for name in names):
        raise BadCheckpoint(f"{where} names files elsewhere")
    if any(part.file not in names for entry in manifest.tensors.values() for part in entry.parts):
        raise BadCheckpoint(f"{where} does not list all of its files")
    return manifest
