"""Verification of a dataset against its manifest, and statistics of its samples.

Every hash, offset and id is verified.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.corpus.values import SPECIAL_TOKENS_PER_SAMPLE, Inspected, SeqLengthEffect
from autotune.corpus.workplace import StageMeter
from trainer.data.batch_plan import MIN_BLOCK_SAMPLES
from trainer.data.dataset import TokenDataset
from trainer.data.packing import pack_sequences
from trainer.data.permutation import permute
from trainer.formats.errors import BadConfig, UnreadableFile, unreadable
from trainer.formats.manifest import (
    DATASET_FILES,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    LengthHistogram,
    Manifest,
    Shard,
    Split,
    read_manifest,
)
from trainer.formats.npy_file import open_npy
from trainer.staging.threads import run_in_threads

# A multiple of every item size, so that no number is split.
_CHUNK_BYTES = 4 * 2**20
_MAX_THREADS = 8
DEFAULT_SEQ_LENGTHS_TOKENS = (128, 512, 1024, 2048)
Look = Callable[[int, npt.NDArray[Any]], str | None]
"""Function that returns the first fault in numbers of a file, from the position of the
first of them."""
SAMPLED = 65_536
"""Number of samples whose lengths are read: about a second on a cold disk, and three
digits of precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A difference between a dataset and its manifest, and the file that has it."""

    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of a verification: files and bytes read, and all faults."""

    manifest: Manifest
    files: int
    bytes_read: int
    faults: tuple[Fault, ...]


def verify(directory: Path, stage: Callable[[str], Any]) -> Verified:
    """Compare all of a dataset with its manifest.

    ``stage`` shows progress.

    Raises:
        BadConfig: If there is no manifest.
        UnreadableFile: If a file may be intact, but cannot be read.
    """
    manifest = read_manifest(directory)
    splits = {"train": manifest.train, "validation": manifest.validation}
    shards = [(split, shard) for split in splits.values() for shard in split.shards]
    item_bytes = np.dtype(manifest.dtype).itemsize
    total_bytes = sum(
        shard.tokens * item_bytes + 8 * (shard.samples + 1) for _, shard in shards
    )
    own = {
        *DATASET_FILES,
        *(name for _, one in shards for name in (one.tokens_file, one.offsets_file)),
    }
    foreign = sorted(
        entry.name for entry in directory.iterdir() if entry.name not in own
    )
    faults = [
        Fault(file=name, what="does not belong to the dataset") for name in foreign
    ]
    tokenizer_path = directory / TOKENIZER_NAME
    try:
        with os.fdopen(
            os.open(tokenizer_path, os.O_RDONLY | os.O_NOFOLLOW), "rb"
        ) as file:
            what = _hash_fault(
                hashlib.file_digest(file, "sha256").hexdigest(),
                manifest.tokenizer_sha256,
            )
    except OSError as error:
        cannot_read = unreadable(tokenizer_path, error)
        if cannot_read is not None:
            raise cannot_read from error
        what = f"cannot be read: {error.strerror}"
    faults += [Fault(file=TOKENIZER_NAME, what=what)] if what else []
    with stage("verify") as update:
        # Updated by several threads; a slightly outdated sum is harmless.
        meter = StageMeter(update, total_bytes, in_bytes=True)
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        checked = run_in_threads(
            lambda one: _check_shard(directory, manifest, *one, meter), shards, threads
        )
    faults += [fault for found, _ in checked for fault in found]
    for name, split in splits.items():
        of_split = [
            one
            for one, (owner, _) in zip(checked, shards, strict=True)
            if owner is split
        ]
        counts = sum(
            (counts for _, counts in of_split),
            np.zeros(len(split.length_histogram.counts), dtype=np.int64),
        )
        if (
            not any(found for found, _ in of_split)
            and counts.tolist() != split.length_histogram.counts
        ):
            what = f"the length histogram of {name} does not match its offsets"
            faults.append(Fault(file=MANIFEST_NAME, what=what))
    token_bytes = (manifest.train.tokens + manifest.validation.tokens) * item_bytes
    if manifest.source.token_bytes != token_bytes:
        what = (
            f"source.token_bytes is {manifest.source.token_bytes}, but the shards"
            f" contain {token_bytes}"
        )
        faults.append(Fault(file=MANIFEST_NAME, what=what))
    return Verified(
        manifest=manifest,
        files=2 * len(shards) + 2,
        bytes_read=meter.done,
        faults=tuple(faults),
    )


def _check_shard(
    directory: Path, manifest: Manifest, split: Split, shard: Shard, meter: StageMeter
) -> tuple[list[Fault], npt.NDArray[np.int64]]:
    """Return the faults of a shard, and its sample lengths.

    The lengths are the number of samples in each bin of the manifest's histogram.
    """
    offsets = _Offsets(shard.tokens, split.length_histogram)
    # Other special tokens than the unknown one are only added to sequences.
    reserved = np.array(
        sorted(set(manifest.special_ids.all()) - {manifest.special_ids.unk})
    )
    ids = functools.partial(_wrong_id, manifest.used_vocab_size, reserved)
    faults: list[Fault] = []
    for name, dtype, length, sha256, look in (
        (shard.tokens_file, manifest.dtype, shard.tokens, shard.tokens_sha256, ids),
        (
            shard.offsets_file,
            "uint64",
            shard.samples + 1,
            shard.offsets_sha256,
            offsets.look,
        ),
    ):
        whats = _faults_of(
            directory / name, np.dtype(dtype), length, sha256, look=look, meter=meter
        )
        faults += [Fault(file=name, what=what) for what in whats if what]
    return faults, offsets.counts


def _wrong_id(
    used: int, reserved: npt.NDArray[Any], first: int, ids: npt.NDArray[Any]
) -> str | None:
    """Describe the first id that exceeds the vocabulary or is a special token.

    Returns:
        The description, or None if there is no such id.
    """
    wrong = (ids >= used) | np.isin(ids, reserved)
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    why = f"not below {used}" if ids[at] >= used else "a special token"
    return f"id {ids[at]} at position {first + at} is {why}"


class _Offsets:
    """Check of a shard's offsets, and count of its sample lengths.

    Offsets begin with 0, never descend, and end with the number of ids.
    """

    def __init__(self, tokens: int, histogram: LengthHistogram) -> None:
        self._tokens = tokens
        self._edges = np.array(histogram.edges)
        self.counts = np.zeros(len(self._edges), dtype=np.int64)
        self._last = np.zeros(0, dtype=np.uint64)

    def look(self, first: int, offsets: npt.NDArray[Any]) -> str | None:
        """Return the first fault in the next offsets of the shard.

        They continue those of the last call. Without offsets, the end of the shard is
        checked.
        """
        if not len(offsets):
            last = int(self._last[0])
            return (
                None
                if last == self._tokens
                else f"the last offset is {last}, expected {self._tokens}"
            )
        if not first and offsets[0] != 0:
            return f"the first offset is {offsets[0]}, expected 0"
        joined = np.concatenate([self._last, offsets])
        self._last = offsets[-1:]
        descending = joined[1:] < joined[:-1]
        if descending.any():
            return (
                f"offset {first + bool(not first) + int(np.argmax(descending))} is less"
                " than the one before it"
            )
        bins = np.searchsorted(self._edges, np.diff(joined), side="right") - 1
        self.counts += np.bincount(bins[bins >= 0], minlength=len(self.counts))
        return None


def _faults_of(
    path: Path,
    kind: np.dtype[Any],
    length: int,
    sha256: str,
    *,
    look: Look,
    meter: StageMeter,
) -> list[str | None]:
    """Read a file once: hash every chunk, and call ``look`` until the first fault.

    The last call of ``look`` is with an empty chunk.
    """
    try:
        fd, start = open_npy(path, kind, length)
    except UnreadableFile:
        raise
    except BadConfig as error:
        return [error.message.removeprefix(f"{path}: ")]
    size_bytes = length * kind.itemsize
    what: str | None = None
    try:
        hashed = hashlib.sha256(os.pread(fd, start, 0))
        for position in range(0, size_bytes, _CHUNK_BYTES):
            chunk = os.pread(
                fd, min(_CHUNK_BYTES, size_bytes - position), start + position
            )
            hashed.update(chunk)
            meter.add(len(chunk))
            what = what or look(
                position // kind.itemsize, np.frombuffer(chunk, dtype=kind)
            )
        what = what or look(length, np.zeros(0, dtype=kind))
    except OSError as error:
        return [what, f"cannot be read: {error.strerror}"]
    finally:
        os.close(fd)
    return [what, _hash_fault(hashed.hexdigest(), sha256)]


def _hash_fault(found: str, expected: str) -> str | None:
    return (
        None
        if found == expected
        else f"its SHA-256 is {found[:16]}…, expected {expected[:16]}…"
    )


def inspect(
    directory: Path, seq_length_tokens: Sequence[int] = DEFAULT_SEQ_LENGTHS_TOKENS
) -> Inspected:
    """Return lengths of random samples and the effect of sequence lengths.

    Raises:
        BadConfig: If the directory holds no dataset.
    """
    dataset = TokenDataset.open(directory)
    count = min(SAMPLED, len(dataset))
    # The first of a seeded permutation: random, and the same every time.
    samples = permute(np.arange(count, dtype=np.uint64), max(1, len(dataset)), 0, 0)
    lengths = dataset.locate(samples.astype(np.int64))[2]
    dataset.close()
    some = len(lengths) > 0
    return Inspected(
        manifest=dataset.manifest,
        sampled=count,
        percentiles=(
            {
                p: int(np.percentile(lengths, p, method="lower"))
                for p in (10, 50, 75, 90, 99)
            }
            if some
            else {}
        ),
        mean_tokens=float(lengths.mean()) if some else 0.0,
        longest_tokens=int(lengths.max(initial=0)),
        rows=(
            tuple(_seq_length_effect(lengths, tokens) for tokens in seq_length_tokens)
            if some
            else ()
        ),
    )


def _seq_length_effect(
    lengths: npt.NDArray[np.int64], seq_length_tokens: int
) -> SeqLengthEffect:
    framed = lengths + SPECIAL_TOKENS_PER_SAMPLE
    cut = np.minimum(framed, seq_length_tokens)
    # As the input pipeline packs them.
    block = max(MIN_BLOCK_SAMPLES, seq_length_tokens)
    blocks = [cut[first : first + block] for first in range(0, len(cut), block)]
    rows = sum(
        int(pack_sequences(part, seq_length_tokens).max()) + 1 for part in blocks
    )
    real = int(cut.sum())
    padded = real / (len(cut) * seq_length_tokens)
    packed = real / (rows * seq_length_tokens)
    return SeqLengthEffect(
        seq_length_tokens=seq_length_tokens,
        padded_waste=1 - padded,
        cut_samples=float((framed > seq_length_tokens).mean()),
        cut_tokens=float((framed - cut).sum() / max(1, int(lengths.sum()))),
        packed_efficiency=packed,
        packing_gain=packed / padded,
    )
