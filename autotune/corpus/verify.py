"""Whether a dataset is what its manifest says: every hash, offset and id. All faults are found, not the first."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.corpus.meter import Meter, Update
from trainer.copying import in_threads
from trainer.dataset import (
    MANIFEST_NAME,
    PREPARED_NAME,
    REJECTS_NAME,
    TOKENIZER_NAME,
    LengthHistogram,
    Manifest,
    Shard,
    Split,
    open_npy,
    read_manifest,
)
from trainer.errors import BadConfig

# A multiple of every item size, so that no number is cut in two.
_CHUNK_BYTES = 4 * 2**20
_MAX_THREADS = 8
_EXPECTED = (MANIFEST_NAME, TOKENIZER_NAME, REJECTS_NAME, PREPARED_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is not as it should be, and in which file."""

    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was looked at, and what was found."""

    manifest: Manifest
    files: int
    bytes_read: int
    faults: tuple[Fault, ...]


def verify(directory: Path, stage: Callable[[str], Any], *, threads: int | None = None) -> Verified:
    """Read a dataset once, and hold all of it against its manifest.

    Args:
        directory: The dataset.
        stage: Opens the display of progress.
        threads: Files that are read at once; None is one per processor.

    Raises:
        BadConfig: If there is no manifest to hold it against.
    """
    manifest = read_manifest(directory)
    splits = {"train": manifest.train, "validation": manifest.validation}
    shards = [(split, shard) for split in splits.values() for shard in split.shards]
    item_bytes = np.dtype(manifest.dtype).itemsize
    total_bytes = sum(shard.tokens * item_bytes + 8 * (shard.samples + 1) for _, shard in shards)
    faults = [*_foreign_files(directory, manifest), *_tokenizer_faults(directory, manifest)]
    with stage("verify") as update:
        meter = _SharedMeter(update, total_bytes)
        checked = in_threads(
            lambda one: _check_shard(directory, manifest, one[0], one[1], meter), shards, threads or _default_threads()
        )
    faults += [fault for one in checked for fault in one.faults]
    for name, split in splits.items():
        own = [one for one, (owner, _) in zip(checked, shards, strict=True) if owner is split]
        faults += _histogram_faults(name, split, own)
    token_bytes = (manifest.train.tokens + manifest.validation.tokens) * item_bytes
    if manifest.source.token_bytes != token_bytes:
        what = f"source.token_bytes is {manifest.source.token_bytes}, and the shards hold {token_bytes}"
        faults.append(Fault(file=MANIFEST_NAME, what=what))
    return Verified(manifest=manifest, files=2 * len(shards) + 2, bytes_read=meter.done_bytes, faults=tuple(faults))


def _default_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


class _SharedMeter:
    """Progress of several threads; a sum that is a little behind does no harm."""

    def __init__(self, update: Update, total_bytes: int) -> None:
        self._meter = Meter(update, total_bytes, in_bytes=True)
        self.done_bytes = 0

    def add(self, amount: int) -> None:
        """Note bytes that were read."""
        self.done_bytes += amount
        self._meter.add(amount, fresh=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedShard:
    faults: list[Fault]
    counts: npt.NDArray[np.int64]
    """Samples by the bins of the manifest's histogram."""


@dataclass(frozen=True, slots=True)
class _File:
    """What the manifest says of a file."""

    directory: Path
    name: str
    dtype: str
    length: int
    sha256: str


def _check_shard(directory: Path, manifest: Manifest, split: Split, shard: Shard, meter: _SharedMeter) -> _CheckedShard:
    offsets = _Offsets(shard.tokens, split.length_histogram)
    return _CheckedShard(
        faults=[
            *_check_file(
                _File(directory, shard.tokens_file, manifest.dtype, shard.tokens, shard.tokens_sha256),
                _Ids(manifest),
                meter,
            ),
            *_check_file(
                _File(directory, shard.offsets_file, "uint64", shard.samples + 1, shard.offsets_sha256), offsets, meter
            ),
        ],
        counts=offsets.counts,
    )


class _Ids:
    """Looks at ids: below the vocabulary's size, and none that frames or masks."""

    def __init__(self, manifest: Manifest) -> None:
        special = manifest.special_ids
        self._used = manifest.used_vocab_size
        # An unknown word is content; the others are added when rows are made.
        self._forbidden = np.array(sorted(set(special.all()) - {special.unk}))
        self._position = 0

    def look(self, ids: npt.NDArray[Any]) -> str | None:
        """The first fault of these, which follow those of the last call."""
        wrong = (ids >= self._used) | np.isin(ids, self._forbidden)
        first = int(np.argmax(wrong)) if wrong.any() else None
        position, self._position = self._position, self._position + len(ids)
        if first is None:
            return None
        why = f"not below {self._used}" if ids[first] >= self._used else "a special token"
        return f"id {ids[first]} at place {position + first} is {why}"

    def end(self) -> str | None:
        """Nothing is left to say."""
        return None


class _Offsets:
    """Looks at offsets: from 0, never descending, to the number of ids."""

    def __init__(self, tokens: int, histogram: LengthHistogram) -> None:
        self._tokens = tokens
        self._edges = np.array(histogram.edges)
        self.counts = np.zeros(len(self._edges), dtype=np.int64)
        self._last: int | None = None
        self._position = 0

    def look(self, offsets: npt.NDArray[Any]) -> str | None:
        """The first fault of these, which follow those of the last call."""
        position, self._position = self._position, self._position + len(offsets)
        before = offsets[:1] if self._last is None else np.array([self._last], dtype=offsets.dtype)
        joined = np.concatenate([before, offsets])
        started, self._last = self._last is not None, int(offsets[-1])
        if not started and offsets[0] != 0:
            return f"the first offset is {offsets[0]}, not 0"
        descending = joined[1:] < joined[:-1]
        if descending.any():
            return f"offset {position + int(np.argmax(descending))} is less than the one before it"
        lengths = np.diff(joined)[0 if started else 1 :]
        bins = np.searchsorted(self._edges, lengths, side="right") - 1
        self.counts += np.bincount(bins[bins >= 0], minlength=len(self.counts))
        return None

    def end(self) -> str | None:
        """Whether the last offset is the end of the ids."""
        return None if self._last == self._tokens else f"the last offset is {self._last}, not {self._tokens}"


def _check_file(file: _File, looker: "_Ids | _Offsets", meter: _SharedMeter) -> list[Fault]:
    """Read a file once: every chunk is hashed and looked at."""
    path, kind = file.directory / file.name, np.dtype(file.dtype)
    try:
        fd, start = open_npy(path, kind, file.length)
    except BadConfig as error:
        return [Fault(file=file.name, what=error.message.removeprefix(f"{path}: "))]
    whats: list[str | None] = []
    try:
        hashed = hashlib.sha256(os.pread(fd, start, 0))
        for position in range(0, file.length * kind.itemsize, _CHUNK_BYTES):
            chunk = os.pread(fd, min(_CHUNK_BYTES, file.length * kind.itemsize - position), start + position)
            hashed.update(chunk)
            meter.add(len(chunk))
            if not any(whats):  # the first place in a file is enough
                whats.append(looker.look(np.frombuffer(chunk, dtype=kind)))
        whats.append(None if any(whats) else looker.end())
        if hashed.hexdigest() != file.sha256:
            whats.append(f"its SHA-256 is {hashed.hexdigest()[:16]}…, the manifest says {file.sha256[:16]}…")
    except OSError as error:
        whats.append(f"cannot be read: {error.strerror}")
    finally:
        os.close(fd)
    return [Fault(file=file.name, what=what) for what in whats if what]


def _histogram_faults(name: str, split: Split, checked: Sequence[_CheckedShard]) -> list[Fault]:
    counts = sum((one.counts for one in checked), np.zeros(len(split.length_histogram.counts), dtype=np.int64))
    if any(one.faults for one in checked) or counts.tolist() == split.length_histogram.counts:
        return []
    return [Fault(file=MANIFEST_NAME, what=f"the length histogram of {name} is not that of its offsets")]


def _tokenizer_faults(directory: Path, manifest: Manifest) -> list[Fault]:
    try:
        fd = os.open(directory / TOKENIZER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return [Fault(file=TOKENIZER_NAME, what=f"cannot be read: {error.strerror}")]
    with os.fdopen(fd, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == manifest.tokenizer_sha256:
        return []
    what = f"its SHA-256 is {found[:16]}…, the manifest says {manifest.tokenizer_sha256[:16]}…"
    return [Fault(file=TOKENIZER_NAME, what=what)]


def _foreign_files(directory: Path, manifest: Manifest) -> list[Fault]:
    shards = [*manifest.train.shards, *manifest.validation.shards]
    expected = {*_EXPECTED, *(name for shard in shards for name in (shard.tokens_file, shard.offsets_file))}
    names = sorted(entry.name for entry in directory.iterdir())
    return [Fault(file=name, what="is no part of the dataset") for name in names if name not in expected]
