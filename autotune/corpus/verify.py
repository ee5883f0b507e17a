"""Verification of a dataset against its manifest, and statistics of its samples.

``verify`` reads every byte and checks every hash, offset and id; ``inspect`` reads the
lengths of random samples.
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

_CHUNK_BYTES = 4 * 2**20
"""Bytes that are read at once: a multiple of every item size, so that no number is
split."""
_MAX_THREADS = 8
DEFAULT_SEQ_LENGTHS_TOKENS = (128, 512, 1024, 2048)
_PERCENTILES = (10, 50, 75, 90, 99)
FindFault = Callable[[int, npt.NDArray[Any]], str | None]
"""Function of a position and the numbers from there on; returns their first fault."""
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

    Args:
        directory: Directory of the dataset.
        stage: Function that opens the progress display of a stage, by its title.

    Raises:
        BadConfig: If there is no manifest.
        UnreadableFile: If a file may be intact, but cannot be read.
    """
    manifest = read_manifest(directory)
    shards = [
        (split, shard)
        for split in (manifest.train, manifest.validation)
        for shard in split.shards
    ]
    item_bytes = np.dtype(manifest.dtype).itemsize
    total_bytes = sum(
        shard.tokens * item_bytes + 8 * (shard.samples + 1) for _, shard in shards
    )
    faults = _foreign_files(directory, manifest)
    faults += _tokenizer_faults(directory, manifest)
    with stage("verify") as update:
        # Updated by several threads; a slightly outdated sum is harmless.
        meter = StageMeter(update, total_bytes, in_bytes=True)
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        checked_shards = run_in_threads(
            lambda pair: _check_shard(directory, manifest, pair[0], pair[1], meter),
            shards,
            threads,
        )
    for checked in checked_shards:
        faults += checked.faults
    faults += _histogram_faults("train", manifest.train, checked_shards)
    faults += _histogram_faults("validation", manifest.validation, checked_shards)
    token_bytes = (manifest.train.tokens + manifest.validation.tokens) * item_bytes
    if manifest.source.token_bytes != token_bytes:
        faults.append(
            Fault(
                file=MANIFEST_NAME,
                what=(
                    f"source.token_bytes is {manifest.source.token_bytes}, but the"
                    f" shards contain {token_bytes}"
                ),
            )
        )
    return Verified(
        manifest=manifest,
        files=2 * len(shards) + 2,
        bytes_read=meter.done,
        faults=tuple(faults),
    )


def _foreign_files(directory: Path, manifest: Manifest) -> list[Fault]:
    """Return a fault for each file that does not belong to the dataset."""
    own = set(DATASET_FILES)
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        own |= {shard.tokens_file, shard.offsets_file}
    names = sorted(entry.name for entry in directory.iterdir())
    return [
        Fault(file=name, what="does not belong to the dataset")
        for name in names
        if name not in own
    ]


def _tokenizer_faults(directory: Path, manifest: Manifest) -> list[Fault]:
    """Return the fault of the tokenizer's file, if it has one.

    Raises:
        UnreadableFile: If the file may be intact, but cannot be read.
    """
    path = directory / TOKENIZER_NAME
    try:
        # A link could lead to any file.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        cannot_read = unreadable(path, error)
        if cannot_read is not None:
            raise cannot_read from error
        reason = f"cannot be read: {error.strerror}"
        return [Fault(file=TOKENIZER_NAME, what=reason)]
    fault = _hash_fault(sha256, manifest.tokenizer_sha256)
    return [] if fault is None else [Fault(file=TOKENIZER_NAME, what=fault)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckedShard:
    """Result of the check of a shard."""

    split: Split
    faults: list[Fault]
    counts: npt.NDArray[np.int64]
    """Number of samples in each bin of the split's histogram."""


def _histogram_faults(
    name: str, split: Split, checked_shards: Sequence[_CheckedShard]
) -> list[Fault]:
    """Return a fault if sound shards of a split differ from its histogram."""
    counts = np.zeros(len(split.length_histogram.counts), dtype=np.int64)
    for checked in checked_shards:
        if checked.split is split:
            if checked.faults:
                return []
            counts += checked.counts
    if counts.tolist() == split.length_histogram.counts:
        return []
    what = f"the length histogram of {name} does not match its offsets"
    return [Fault(file=MANIFEST_NAME, what=what)]


def _check_shard(
    directory: Path, manifest: Manifest, split: Split, shard: Shard, meter: StageMeter
) -> _CheckedShard:
    """Check both files of a shard, and count its sample lengths."""
    # Other special tokens than the unknown one are only added to sequences.
    reserved = np.array(
        sorted(set(manifest.special_ids.all()) - {manifest.special_ids.unk})
    )
    token_faults = _find_faults(
        directory / shard.tokens_file,
        np.dtype(manifest.dtype),
        shard.tokens,
        shard.tokens_sha256,
        find_fault=functools.partial(_wrong_id, manifest.used_vocab_size, reserved),
        meter=meter,
    )
    offsets = _Offsets(shard.tokens, split.length_histogram)
    offset_faults = _find_faults(
        directory / shard.offsets_file,
        np.dtype("uint64"),
        shard.samples + 1,
        shard.offsets_sha256,
        find_fault=offsets.find_fault,
        meter=meter,
    )
    return _CheckedShard(
        split=split, faults=[*token_faults, *offset_faults], counts=offsets.counts
    )


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
    index = int(np.argmax(wrong))
    reason = f"not below {used}" if ids[index] >= used else "a special token"
    return f"id {ids[index]} at position {first + index} is {reason}"


class _Offsets:
    """Check of a shard's offsets, and count of its sample lengths.

    Offsets begin with 0, never descend, and end with the number of ids.
    """

    def __init__(self, tokens: int, histogram: LengthHistogram) -> None:
        self._tokens = tokens
        self._edges = np.array(histogram.edges)
        self.counts = np.zeros(len(self._edges), dtype=np.int64)
        self._last = np.zeros(0, dtype=np.uint64)
        """Last offset so far, as an array; empty before the first one."""

    def find_fault(self, first: int, offsets: npt.NDArray[Any]) -> str | None:
        """Return the first fault in the next offsets of the shard.

        They continue those of the last call. Without offsets, the end of the shard is
        checked.
        """
        if not len(offsets):
            last = int(self._last[0])
            if last == self._tokens:
                return None
            return f"the last offset is {last}, expected {self._tokens}"
        if first == 0 and offsets[0] != 0:
            return f"the first offset is {offsets[0]}, expected 0"
        # The first offset of a shard has none before it.
        first_compared = 1 if first == 0 else first
        joined = np.concatenate([self._last, offsets])
        self._last = offsets[-1:]
        descends = joined[1:] < joined[:-1]
        if descends.any():
            position = first_compared + int(np.argmax(descends))
            return f"offset {position} is less than the one before it"
        bins = np.searchsorted(self._edges, np.diff(joined), side="right") - 1
        self.counts += np.bincount(bins[bins >= 0], minlength=len(self.counts))
        return None


def _find_faults(
    path: Path,
    dtype: np.dtype[Any],
    length: int,
    sha256: str,
    *,
    find_fault: FindFault,
    meter: StageMeter,
) -> list[Fault]:
    """Read a file once: hash every chunk, and look for the first fault in it.

    Args:
        path: The file.
        dtype: Type of its numbers.
        length: How many it has.
        sha256: Hash that it should have.
        find_fault: Function that looks for a fault, until it has found one. Its last
            call is with an empty chunk.
        meter: Progress.

    Raises:
        UnreadableFile: If the file may be intact, but cannot be read.
    """
    try:
        fd, start = open_npy(path, dtype, length)
    except UnreadableFile:
        raise
    except BadConfig as error:
        reason = error.message.removeprefix(f"{path}: ")
        return [Fault(file=path.name, what=reason)]
    size_bytes = length * dtype.itemsize
    fault: str | None = None
    try:
        file_hash = hashlib.sha256(os.pread(fd, start, 0))
        for position in range(0, size_bytes, _CHUNK_BYTES):
            chunk_bytes = min(_CHUNK_BYTES, size_bytes - position)
            chunk = os.pread(fd, chunk_bytes, start + position)
            file_hash.update(chunk)
            meter.add(len(chunk))
            if fault is None:
                first = position // dtype.itemsize
                fault = find_fault(first, np.frombuffer(chunk, dtype=dtype))
        if fault is None:
            fault = find_fault(length, np.zeros(0, dtype=dtype))
        whole_file_fault = _hash_fault(file_hash.hexdigest(), sha256)
    except OSError as error:
        whole_file_fault = f"cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    return [
        Fault(file=path.name, what=what)
        for what in (fault, whole_file_fault)
        if what is not None
    ]


def _hash_fault(sha256: str, expected: str) -> str | None:
    if sha256 == expected:
        return None
    return f"its SHA-256 is {sha256[:16]}…, expected {expected[:16]}…"


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
    if not len(lengths):
        return Inspected(
            manifest=dataset.manifest,
            sampled=count,
            percentiles={},
            mean_tokens=0.0,
            longest_tokens=0,
            rows=(),
        )
    return Inspected(
        manifest=dataset.manifest,
        sampled=count,
        percentiles={
            percentile: int(np.percentile(lengths, percentile, method="lower"))
            for percentile in _PERCENTILES
        },
        mean_tokens=float(lengths.mean()),
        longest_tokens=int(lengths.max()),
        rows=tuple(_seq_length_effect(lengths, tokens) for tokens in seq_length_tokens),
    )


def _seq_length_effect(
    lengths: npt.NDArray[np.int64], seq_length_tokens: int
) -> SeqLengthEffect:
    """Return the effect of a sequence length on samples of these lengths."""
    full_tokens = lengths + SPECIAL_TOKENS_PER_SAMPLE
    kept_tokens = np.minimum(full_tokens, seq_length_tokens)
    # Blocks are as large as those that the input pipeline packs.
    block_samples = max(MIN_BLOCK_SAMPLES, seq_length_tokens)
    packed_sequences = 0
    for first in range(0, len(kept_tokens), block_samples):
        block = kept_tokens[first : first + block_samples]
        sequence_of = pack_sequences(block, seq_length_tokens)
        packed_sequences += int(sequence_of.max()) + 1
    non_padding_tokens = int(kept_tokens.sum())
    padded_efficiency = non_padding_tokens / (len(kept_tokens) * seq_length_tokens)
    packed_efficiency = non_padding_tokens / (packed_sequences * seq_length_tokens)
    cut_tokens = (full_tokens - kept_tokens).sum()
    return SeqLengthEffect(
        seq_length_tokens=seq_length_tokens,
        padded_waste=1 - padded_efficiency,
        cut_samples=float((full_tokens > seq_length_tokens).mean()),
        cut_tokens=float(cut_tokens / max(1, int(lengths.sum()))),
        packed_efficiency=packed_efficiency,
        packing_gain=packed_efficiency / padded_efficiency,
    )
