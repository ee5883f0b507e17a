"""What to prepare, and what tells one preparation from another."""

import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.core.dataset import DEFAULT_VOCAB_SIZE
from autotune.corpus.encode import LengthLimit
from autotune.corpus.find import Found, find_files, partitions
from autotune.corpus.meter import Update
from autotune.corpus.sources import open_source
from autotune.corpus.sources.base import Partition, Source, SourceOptions
from autotune.corpus.split import ValidationSplit
from autotune.errors import MachineLacks

_FORMAT_VERSION = 2
"""Raised when the same request comes to other bytes: results of an older version are not gone on from."""
_KEY_LENGTH = 16

_PLAIN = SourceOptions()
_ONE_IN_A_HUNDRED = ValidationSplit(share=0.01, seed=0)
_NO_LIMIT = LengthLimit(max_tokens=None, long="truncate")

TokenizerKind = Literal["wordlevel", "bpe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to prepare.

    Args:
        sources: Such as ``elf:/usr/bin``; one or several.
        out: The directory that is to become the dataset.
        options: How files are read.
        max_samples: Take the first so many distinct samples; None takes all.
        keep_duplicates: Whether equal samples all stay.
        validation: Which samples are kept apart.
        tokenizer: A ``tokenizer.json`` to use, or the kind to learn; None learns words of programs, byte pairs of text.
        vocab_size: Ids of a learned tokenizer, a multiple of 64.
        limit: What becomes of long samples.
        strict: Whether anything that cannot be used ends the preparation.
        overwrite: Whether a dataset at ``out`` may be replaced.
        workers: Processes on this machine; None is one per processor that this process may use.
        scheduler: Address of a dask scheduler to use instead.
        site: A site file: workers are jobs of its SLURM cluster.
    """

    sources: tuple[str, ...]
    out: Path
    options: SourceOptions = _PLAIN
    max_samples: int | None = None
    keep_duplicates: bool = False
    validation: ValidationSplit = _ONE_IN_A_HUNDRED
    tokenizer: Path | TokenizerKind | None = None
    vocab_size: int = DEFAULT_VOCAB_SIZE
    limit: LengthLimit = _NO_LIMIT
    strict: bool = False
    overwrite: bool = False
    workers: int | None = None
    scheduler: str | None = None
    site: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """What a request reads: every source with its files, cut into partitions in reading order."""

    sources: tuple[Source, ...]
    found: tuple[Found, ...]
    partitions: tuple[Partition, ...]

    @property
    def kinds(self) -> list[str]:
        """Kinds of source, each once."""
        return sorted({source.kind for source in self.sources})


def find_input(request: Request, update: Update) -> Input:
    """Look up the files of a request.

    Args:
        request: What to prepare.
        update: Told how far it is, where files are many.

    Raises:
        BadInput: If a source is unknown or holds nothing.
        MachineLacks: If a library that reads it is not installed.
    """
    opened = [open_source(spec) for spec in request.sources]
    for source, _ in opened:
        _require_libraries(source)
    found = [find_files(source, place, update) for source, place in opened]
    cut = [
        part
        for (source, _), files in zip(opened, found, strict=True)
        for part in partitions(source, files.files, request.options)
    ]
    return Input(sources=tuple(source for source, _ in opened), found=tuple(found), partitions=tuple(cut))


def request_key(request: Request, files: Sequence[Found], tokenizer: bytes | None) -> str:
    """Names everything that decides the result: a run goes on from results of the same key only.

    Where the work is done does not decide it, nor whether rejects are forgiven.
    """
    settings = {
        "format": _FORMAT_VERSION,
        "options": dataclasses.asdict(request.options),
        "max_samples": request.max_samples,
        "keep_duplicates": request.keep_duplicates,
        "validation": dataclasses.asdict(request.validation),
        "tokenizer": hashlib.sha256(tokenizer).hexdigest() if tokenizer else str(request.tokenizer),
        "vocab_size": request.vocab_size,
        "limit": dataclasses.asdict(request.limit),
        "sources": [spec.partition(":")[0] for spec in request.sources],
    }
    named = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for found in files:
        for file in found.files:
            named.update(f"{file.path}\0{file.size_bytes}\0{file.modified_ns}\n".encode(errors="surrogateescape"))
        named.update(b"\n")
    return named.hexdigest()[:_KEY_LENGTH]


def _require_libraries(source: Source) -> None:
    missing = [name for name in source.libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineLacks(
            f"reading {source.kind} needs {' and '.join(missing)}, not installed here",
            next_step=f"Run: pip install 'encoder-autotune[{source.kind}]'",
        )
