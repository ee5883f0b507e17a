"""What to prepare, and what tells one preparation from another."""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.corpus.encode import LengthLimit
from autotune.corpus.sources import Found, find_files, open_source, partitions
from autotune.corpus.sources.base import Partition, Reject, SourceOptions
from autotune.errors import MachineLacks
from trainer.progress import Update

_FORMAT_VERSION = 2
"""Raised when the same request comes to other bytes: results of an older version are not continued."""
_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to prepare: all that decides the result."""

    sources: tuple[str, ...]
    """Such as ``elf:/usr/bin``; one or several."""
    options: SourceOptions
    max_samples: int | None
    """Take the first so many distinct samples; None takes all."""
    keep_duplicates: bool
    validation_share: float
    split_seed: int
    tokenizer: Path | Literal["wordlevel", "bpe"] | None
    """A ``tokenizer.json`` to use, or the kind to learn; None learns words of programs, byte pairs of text."""
    vocab_size: int
    """Ids of a learned tokenizer, a multiple of 64."""
    limit: LengthLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a request reads: every source with its files, cut into partitions in reading order."""

    kinds: list[str]
    """Kinds of source, each once."""
    found: tuple[Found, ...]
    partitions: tuple[Partition, ...]

    @property
    def unreadable(self) -> list[Reject]:
        """Files that may not be read."""
        return [reject for found in self.found for reject in found.unreadable]


def find_input(request: Request, update: Update) -> Input:
    """Look up the files of a request; ``update`` is told how far it is, if files are many.

    Raises:
        BadInput: If a source is unknown or holds nothing.
        MachineLacks: If a library that reads it is not installed.
    """
    opened = [open_source(spec) for spec in request.sources]
    for source, _ in opened:
        missing = [name for name in source.libraries if importlib.util.find_spec(name) is None]
        if missing:
            raise MachineLacks(
                f"reading {source.kind} needs {' and '.join(missing)}, not installed here",
                next_step=f"Run: pip install 'encoder-autotune[{source.kind}]'",
            )
    found = [find_files(source, place, update) for source, place in opened]
    cut = [
        part
        for (source, _), files in zip(opened, found, strict=True)
        for part in partitions(source, files.files, request.options)
    ]
    return Input(kinds=sorted({source.kind for source, _ in opened}), found=tuple(found), partitions=tuple(cut))


def request_key(request: Request, files: Sequence[Found], tokenizer: bytes | None) -> str:
    """Name everything that decides the result: a run continues from results of the same key only."""
    settings = dataclasses.asdict(request) | {
        "format": _FORMAT_VERSION,
        "tokenizer": hashlib.sha256(tokenizer).hexdigest() if tokenizer else str(request.tokenizer),
        "sources": [spec.partition(":")[0] for spec in request.sources],
    }
    named = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for found in files:
        for file in found.files:
            named.update(f"{file.path}\0{file.size_bytes}\0{file.modified_ns}\n".encode(errors="surrogateescape"))
        named.update(b"\n")
    return named.hexdigest()[:_KEY_LENGTH]
