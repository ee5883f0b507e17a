"""The tokenised dataset on disk: manifest, shards, and reading them. No torch here.

A dataset is one directory:

    manifest.json            description of the dataset, with a SHA-256 of every
                             other file
    tokenizer.json           as the ``tokenizers`` library writes it
    train-tokens-00000.npy   flat ids of all samples of a shard, without special
                             tokens (uint16 or uint32)
    train-offsets-00000.npy  uint64, one more than the shard has samples: sample i is
                             ids[offsets[i]:offsets[i + 1]]
    validation-…             the same for the held-out samples
    rejects.jsonl            input that could not be used, for you to read; not part
                             of the dataset
    prepared.json            the request that made it, to skip a repeated one; not
                             part of the dataset

No attention mask is stored: lengths imply it. Special tokens are added when a sample is
read into a sequence.
"""

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy
from pydantic import Field, model_validator

from trainer.config.tables import (
    StrictTable,
    canonical_sha256,
    nearest,
    parse_table,
    read_json,
)
from trainer.data.raw_files import preparation_of
from trainer.errors import BadConfig, unreadable

Int64 = npt.NDArray[np.int64]
Ids = npt.NDArray[np.unsignedinteger[Any]]

DATASET_SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
REJECTS_NAME = "rejects.jsonl"
PREPARED_NAME = "prepared.json"
DATASET_FILES = (MANIFEST_NAME, TOKENIZER_NAME, REJECTS_NAME, PREPARED_NAME)
"""Names of the files besides the shards."""

MAX_CUT_TOKENS_SHARE = 0.05
"""Share of tokens cut off at the sequence length above which you are warned: a few long
samples are usual, but this much text is worth longer sequences or split samples."""
_DOCS = "dataset-not-found"
_MAX_NPY_HEADER_BYTES = 4096
_OFFSET_BYTES = 8
_FileRead = tuple[int, int, int, int]
"""One read of a file: descriptor, first byte in the file, first byte in the target, and
end (exclusive) in the target. A tuple, as there are thousands per micro-batch."""

SplitName = Literal["train", "validation"]

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Names from a manifest must not lead out of its directory.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class SpecialIds(StrictTable):
    """Ids that have a role in masked-LM training."""

    pad: Count
    unk: Count
    cls: Count
    sep: Count
    mask: Count

    def all(self) -> tuple[int, ...]:
        """Return every special id, ascending."""
        return tuple(sorted({self.pad, self.unk, self.cls, self.sep, self.mask}))


class Shard(StrictTable):
    """Files of one shard: tokens and offsets."""

    tokens_file: FileName
    offsets_file: FileName
    samples: Count
    tokens: Count
    tokens_sha256: Sha256
    offsets_sha256: Sha256


class LengthHistogram(StrictTable):
    """Histogram of sample lengths in tokens, special tokens not counted.

    ``counts[i]`` samples have a length in ``[edges[i], edges[i + 1])``; the last bin is
    open-ended.
    """

    edges: list[Count]
    counts: list[Count]

    @model_validator(mode="after")
    def _check_bins(self) -> Self:
        if len(self.edges) != len(self.counts):
            raise ValueError(
                f"{len(self.edges)} edges do not match {len(self.counts)} counts"
            )
        if any(first >= second for first, second in itertools.pairwise(self.edges)):
            raise ValueError("edges must be ascending")
        return self


class Split(StrictTable):
    """Samples of the training or the validation split."""

    shards: list[Shard]
    length_histogram: LengthHistogram

    @property
    def samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Stored tokens in all shards, special tokens not counted."""
        return sum(shard.tokens for shard in self.shards)

    def cut_tokens_share(self, limit_tokens: int) -> float | None:
        """Return the share of tokens that is lost if samples are cut to a limit.

        An estimate, as the histogram has no exact lengths: samples within the limit
        count as the middle of their bin, and the result stays within the bounds that
        the bins of longer ones set.

        Args:
            limit_tokens: Longest sample, special tokens not counted.

        Returns:
            The share, 0 to 1; None without tokens or their lengths.
        """
        edges = self.length_histogram.edges
        if len(edges) < 2 or not self.tokens:
            return None
        kept_tokens = 0.0
        least_lost_tokens = 0
        most_lost_tokens = 0
        for number, count in enumerate(self.length_histogram.counts):
            first = edges[number]
            is_open_ended = number + 1 == len(edges)
            last = first if is_open_ended else edges[number + 1] - 1
            kept_tokens += count * min((first + last) / 2, limit_tokens)
            least_lost_tokens += count * max(0, first - limit_tokens)
            if is_open_ended and count:
                most_lost_tokens = self.tokens
            else:
                most_lost_tokens += count * max(0, last - limit_tokens)
        lost_tokens = min(
            max(self.tokens - kept_tokens, least_lost_tokens), most_lost_tokens
        )
        return min(lost_tokens / self.tokens, 1.0)


class SourceStatistics(StrictTable):
    """Sources of the tokens, and counts of input that was left out."""

    kinds: list[str]
    """Kinds of source, such as ``elf``; each once, in alphabetical order."""
    files: Count
    """Files that gave at least one sample."""
    rejected: Count
    """Files, or lines and rows of files, that could not be used."""
    duplicate_samples: Count
    """Samples left out as duplicates of others."""
    empty_samples: Count
    """Samples left out because tokenization yields no token."""
    truncated_samples: Count
    """Samples truncated at the maximum length."""
    split_samples: Count
    """Samples split into several at the maximum length."""
    raw_bytes: Count
    """Size of the files read, each counted in full and as it is stored: compressed
    files count less than their text."""
    text_bytes: Count | None = None
    """Size of the text of all samples, duplicates too; None in older datasets."""
    token_bytes: Count
    """Size of all stored ids."""
    unknown_tokens: Count


class Manifest(StrictTable):
    """Content of ``manifest.json``."""

    schema_version: Literal[2]
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Field(gt=0, le=2**31)]
    """Rows of the model's embedding table: a multiple of 64, for Tensor Cores."""
    used_vocab_size: Annotated[int, Field(gt=0, le=2**31)]
    """Number of the tokenizer's ids; higher ids only pad the embedding table."""
    special_ids: SpecialIds
    tokenizer_sha256: Sha256
    train: Split
    validation: Split
    source: SourceStatistics

    @model_validator(mode="after")
    def _vocabulary_is_complete(self) -> Self:
        if self.used_vocab_size > self.vocab_size:
            raise ValueError(
                f"used_vocab_size {self.used_vocab_size} exceeds vocab_size"
                f" {self.vocab_size}"
            )
        if max(self.special_ids.all()) >= self.used_vocab_size:
            raise ValueError(
                f"special ids must be below used_vocab_size {self.used_vocab_size}"
            )
        return self

    @property
    def dataset_hash(self) -> str:
        """SHA-256 of the manifest's canonical JSON.

        Identifies the content, as the manifest holds every file's hash.
        """
        return canonical_sha256(self.model_dump(mode="json"))


def read_manifest(directory: Path) -> Manifest:
    """Read a dataset's manifest.

    Raises:
        BadConfig: If it is missing, unreadable, invalid or of another schema version.
    """
    path = directory / MANIFEST_NAME
    try:
        is_file = path.is_file()
    except OSError as error:
        cannot_read = unreadable(path, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise _not_a_dataset(directory) from error
    if not is_file:
        raise _not_a_dataset(directory)
    table = read_json(path)
    version = table.get("schema_version") if isinstance(table, dict) else None
    if version != DATASET_SCHEMA_VERSION:
        raise BadConfig(
            f"{path} has schema version {version!r}; this program reads version"
            f" {DATASET_SCHEMA_VERSION}",
            next_step=(
                "Prepare the dataset again: autotune data prepare SOURCE --out DIR"
            ),
        )
    return parse_table(Manifest, table, where=str(path))


def _not_a_dataset(directory: Path) -> BadConfig:
    """Return the error for a path without a manifest, with the likeliest remedy."""
    next_step = (
        "Pass your dataset with --data DIR; if you have none: autotune data prepare"
        " text:FILE --out DIR"
    )
    if directory.is_file():
        message = f"{directory} is a raw file, not a prepared dataset"
        next_step = preparation_of(directory).next_step()
    elif not directory.is_dir():
        message = f"dataset not found: {os.path.normpath(directory)}"
        manifests = directory.parent.glob(f"*/{MANIFEST_NAME}")
        names = sorted(manifest.parent.name for manifest in manifests)
        similar_name = nearest(directory.name, names)
        if similar_name:
            next_step = f"Did you mean {directory.parent / similar_name}?"
    else:
        message = f"{directory} is not a dataset: {MANIFEST_NAME} not found"
    return BadConfig(message, next_step=next_step, docs=_DOCS)


class TokenDataset:
    """Random access to the samples of one split.

    Samples are read with ``pread``, so memory does not grow with their number. Forked
    processes may share one instance. A file that is missing or does not match the
    manifest is a ``BadConfig``.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, split: SplitName = "train"
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self._split = split
        self.dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        split_table = manifest.train if split == "train" else manifest.validation
        self._shards = split_table.shards
        self._fds: list[int] = []
        # True if the last reads had to wait for the disk, as the first ones will.
        self._waited = True
        # By shard: descriptor and first byte of the ids, and of the offsets.
        files = np.array([self._open(shard) for shard in self._shards], dtype=np.int64)
        columns = files.reshape(-1, 4).T.copy()
        self._tokens_fd, self._tokens_start = columns[:2]
        self._offsets_fd, self._offsets_start = columns[2:]
        ends = np.cumsum([shard.samples for shard in self._shards], dtype=np.int64)
        self._samples = int(ends[-1]) if len(ends) else 0
        self._first_samples = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self._tokens = np.array(
            [shard.tokens for shard in self._shards], dtype=np.int64
        )

    @classmethod
    def open(cls, directory: Path, split: SplitName = "train") -> Self:
        """Open a dataset directory."""
        return cls(directory, read_manifest(directory), split)

    def _open(self, shard: Shard) -> tuple[int, int, int, int]:
        """Return descriptor and first byte of a shard's ids, and of its offsets."""
        tokens_fd, tokens_start = open_npy(
            self.directory / shard.tokens_file, self.dtype, shard.tokens
        )
        self._fds.append(tokens_fd)
        offsets_fd, offsets_start = open_npy(
            self.directory / shard.offsets_file, np.dtype("uint64"), shard.samples + 1
        )
        self._fds.append(offsets_fd)
        return tokens_fd, tokens_start, offsets_fd, offsets_start

    def __len__(self) -> int:
        return self._samples

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.directory, self.manifest, self._split))

    def prefetch_offsets(self, samples: Callable[[], Int64]) -> None:
        """Let the kernel prefetch the offsets of samples that are needed soon.

        It has no effect if the last reads were in the page cache; ``samples``, which
        returns the samples (N,), is then not called.
        """
        if not self._waited:
            return
        shards, first_bytes = self._offsets_of(samples())
        fds = self._offsets_fd[shards].tolist()
        for fd, first_byte in zip(fds, first_bytes.tolist(), strict=True):
            os.posix_fadvise(fd, first_byte, 2 * _OFFSET_BYTES, os.POSIX_FADV_WILLNEED)

    def locate(self, samples: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the location of samples.

        Args:
            samples: Indices of samples in the split, shape (N,).

        Returns:
            The shard of each sample, the index of its first id in the shard, and the
            number of its ids without special tokens; shapes (N,).

        Raises:
            IndexError: If there is no such sample.
            BadConfig: If a shard's offsets do not ascend within its file, or the file
                became shorter.
        """
        if len(samples):
            lowest = int(samples.min())
            highest = int(samples.max())
            if lowest < 0 or highest >= self._samples:
                raise IndexError(f"samples {lowest} to {highest} of {self._samples}")
        shards, first_bytes = self._offsets_of(samples)
        pairs = np.empty((len(samples), 2), dtype="<u8")
        pair_bytes = 2 * _OFFSET_BYTES
        targets = pair_bytes * np.arange(len(samples))
        self._read_all(
            pairs, self._offsets_fd[shards], first_bytes, targets, targets + pair_bytes
        )
        begins, ends = pairs.astype(np.int64).T.copy()
        is_wrong = (begins < 0) | (begins > ends) | (ends > self._tokens[shards])
        if is_wrong.any():
            first_wrong = int(np.flatnonzero(is_wrong)[0])
            shard = int(shards[first_wrong])
            sample_in_shard = int(samples[first_wrong] - self._first_samples[shard])
            raise self._corrupt(
                self._shards[shard].offsets_file,
                f"the offsets of sample {sample_in_shard} exceed the shard",
            )
        return shards, begins, ends - begins

    def _offsets_of(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return the shards of samples, and where their offsets are in its file.

        A sample has two offsets, its begin and its end; the first byte of both is
        returned.
        """
        shards = np.searchsorted(self._first_samples, samples, side="right") - 1
        samples_in_shard = samples - self._first_samples[shards]
        return shards, self._offsets_start[shards] + _OFFSET_BYTES * samples_in_shard

    def read_into(
        self, ids: Ids, targets: Int64, shards: Int64, begins: Int64, tokens: Int64
    ) -> None:
        """Read the ids of located samples.

        Args:
            ids: Array that receives the ids.
            targets: Position in ``ids`` of each sample's first id, shape (N,).
            shards: As ``locate`` returns it.
            begins: As ``locate`` returns it.
            tokens: Number of ids to read of each sample, shape (N,).

        Raises:
            BadConfig: If a file became shorter.
        """
        id_bytes = self.dtype.itemsize
        self._read_all(
            ids,
            self._tokens_fd[shards],
            self._tokens_start[shards] + begins * id_bytes,
            targets * id_bytes,
            (targets + tokens) * id_bytes,
        )

    def _read_all(
        self,
        target: npt.NDArray[Any],
        fds: Int64,
        file_begins: Int64,
        target_begins: Int64,
        target_ends: Int64,
    ) -> None:
        """Fill byte ranges of ``target`` with those that begin there in the files.

        Reads that hit the page cache come first. The kernel prefetches the others
        together, so that a batch of reads waits about as long as one.

        Raises:
            BadConfig: If a read reaches the end of its file.
        """
        view = memoryview(target.reshape(-1).view(np.uint8).data)
        reads: list[_FileRead] = list(
            zip(
                fds.tolist(),
                file_begins.tolist(),
                target_begins.tolist(),
                target_ends.tolist(),
                strict=True,
            )
        )
        waiting = _read_cached(view, reads)
        self._waited = len(waiting) > 0
        for fd, file_begin, begin, end in waiting:
            os.posix_fadvise(fd, file_begin, end - begin, os.POSIX_FADV_WILLNEED)
        for fd, file_begin, begin, end in waiting:
            if os.preadv(fd, (view[begin:end],), file_begin) != end - begin:
                raise self._corrupt(self._name_of(fd), "became shorter while in use")

    def _name_of(self, fd: int) -> str:
        """Return the name of an open file."""
        number, is_offsets = divmod(self._fds.index(fd), 2)
        shard = self._shards[number]
        return shard.offsets_file if is_offsets else shard.tokens_file

    def read(self, sample: int, max_tokens: int | None = None) -> Ids:
        """Return the ids of one sample, at most ``max_tokens``, without special tokens.

        Raises:
            IndexError: If there is no such sample.
            BadConfig: As ``locate`` does.
        """
        shards, begins, tokens = self.locate(np.array([sample], dtype=np.int64))
        if max_tokens is not None:
            tokens = np.minimum(tokens, max_tokens)
        ids = np.empty(int(tokens[0]), dtype=self.dtype)
        self.read_into(ids, np.zeros(1, dtype=np.int64), shards, begins, tokens)
        return ids

    def drop_page_cache(self) -> None:
        """Drop the files from the page cache, so that the next reads come from disk.

        The kernel keeps pages that other processes use.
        """
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.fsync(fd)  # unsynced pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())

    def _corrupt(self, file: str, fault: str) -> BadConfig:
        next_step = (
            "The dataset is corrupt. Find all faults: autotune data verify"
            f" {self.directory}"
        )
        return BadConfig(f"{self.directory / file}: {fault}", next_step=next_step)


def _read_cached(view: memoryview, reads: list[_FileRead]) -> list[_FileRead]:
    """Perform the reads that hit the page cache; return the others."""
    waiting = []
    for number, read in enumerate(reads):
        fd, file_begin, begin, end = read
        try:
            count = os.preadv(fd, (view[begin:end],), file_begin, os.RWF_NOWAIT)
        except BlockingIOError:
            waiting.append(read)
            continue
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # This file system does not support RWF_NOWAIT.
            return [*waiting, *reads[number:]]
        if count != end - begin:
            waiting.append(read)
    return waiting


def open_npy(path: Path, dtype: np.dtype[Any], length: int) -> tuple[int, int]:
    """Open a one-dimensional ``.npy`` file.

    The header is read here, not by ``numpy.load``, so that only numbers are loaded.

    Returns:
        Its descriptor and the first byte of its data.

    Raises:
        UnreadableFile: If it may be intact, but cannot be read.
        BadConfig: If it is missing, or its header or size is wrong.
    """
    next_step = "The dataset is corrupt. Prepare or copy it again."
    try:
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        cannot_read = unreadable(path, error)
        if cannot_read is not None:
            raise cannot_read from error
        raise BadConfig(
            f"cannot read {path}: {error.strerror}", next_step=next_step
        ) from error
    try:
        start = _check_npy(fd, dtype, length)
    except (ValueError, TypeError, SyntaxError, TokenError) as error:
        os.close(fd)
        raise BadConfig(f"{path}: {error}", next_step=next_step) from error
    # Reads are random, so read-ahead would only evict other data from the page cache.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd, start


def _check_npy(fd: int, dtype: np.dtype[Any], length: int) -> int:
    """Return the first byte of an open ``.npy`` file's data.

    Raises:
        ValueError: If it does not contain ``length`` numbers of ``dtype``. numpy's
            parser of the header also raises other errors.
    """
    header = io.BytesIO(os.pread(fd, _MAX_NPY_HEADER_BYTES, 0))
    readers = {
        (1, 0): npy.read_array_header_1_0,
        (2, 0): npy.read_array_header_2_0,
    }
    if not header.getvalue().startswith(npy.MAGIC_PREFIX):
        raise ValueError("not an .npy file")
    read_header = readers.get(npy.read_magic(header))
    if read_header is None:
        raise ValueError("not an .npy file")
    shape, fortran_order, stored_dtype = read_header(header)
    if stored_dtype != dtype or shape != (length,) or fortran_order:
        raise ValueError(
            f"contains {stored_dtype.str} of shape {shape}, not {dtype.str} of"
            f" ({length},)"
        )
    start = header.tell()
    if os.fstat(fd).st_size != start + length * dtype.itemsize:
        raise ValueError("its size does not match its header")
    return start
