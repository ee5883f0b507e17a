"""The tokenised dataset on disk: manifest, shards, and reading them. No torch here.

A dataset is one directory:

    manifest.json            description of the dataset, with a SHA-256 of every other file
    tokenizer.json           as the ``tokenizers`` library writes it
    train-tokens-00000.npy   flat ids of all samples of a shard, without special tokens (uint16 or uint32)
    train-offsets-00000.npy  uint64, one more than the shard has samples: sample i is
    ids[offsets[i]:offsets[i + 1]]
    validation-…             the same for the held-out samples
    rejects.jsonl            input that could not be used, for you to read; not part of the dataset
    prepared.json            the request that made it, to skip a repeated one; not part of the dataset

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
from trainer.errors import BadConfig

DATASET_SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
_DOCS = "dataset-not-found"
TOKENIZER_NAME = "tokenizer.json"
REJECTS_NAME = "rejects.jsonl"
PREPARED_NAME = "prepared.json"
DATASET_FILES = (MANIFEST_NAME, TOKENIZER_NAME, REJECTS_NAME, PREPARED_NAME)
"""Names of the files besides the shards."""

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
    """Size of the files read, each counted in full."""
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
        BadConfig: If it is missing, invalid or of another schema version.
    """
    path = directory / MANIFEST_NAME
    pass_one = (
        "Pass your dataset with --data DIR; if you have none: autotune data prepare"
        " text:FILE --out DIR"
    )
    if directory.is_file():
        first = f"Prepare it first: autotune data prepare text:{directory} --out DIR"
        raise BadConfig(
            f"{directory} is a raw file, not a prepared dataset",
            next_step=first,
            docs=_DOCS,
        )
    if not directory.is_dir():
        close = nearest(
            directory.name,
            sorted(
                one.parent.name for one in directory.parent.glob(f"*/{MANIFEST_NAME}")
            ),
        )
        next_step = f"Did you mean {directory.parent / close}?" if close else pass_one
        raise BadConfig(
            f"dataset not found: {os.path.normpath(directory)}",
            next_step=next_step,
            docs=_DOCS,
        )
    if not path.is_file():
        raise BadConfig(
            f"{directory} is not a dataset: {MANIFEST_NAME} not found",
            next_step=pass_one,
            docs=_DOCS,
        )
    raw = read_json(path)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != DATASET_SCHEMA_VERSION:
        message = (
            f"{path} has schema version {version!r}; this program reads version"
            f" {DATASET_SCHEMA_VERSION}"
        )
        raise BadConfig(
            message,
            next_step=(
                "Prepare the dataset again: autotune data prepare SOURCE --out DIR"
            ),
        )
    return parse_table(Manifest, raw, where=str(path))


Int64 = npt.NDArray[np.int64]
Ids = npt.NDArray[np.unsignedinteger[Any]]


class TokenDataset:
    """Random access to the samples of one split, with ``pread``: memory does not grow with the samples read.

    Forked processes may share one instance. A file that is missing or does not match
    the manifest is a ``BadConfig``.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, split: SplitName = "train"
    ) -> None:
        self.directory, self.manifest, self._split = directory, manifest, split
        self.dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        self._shards = (
            manifest.train if split == "train" else manifest.validation
        ).shards
        self._fds: list[int] = []
        # True if the last reads had to wait for the disk, as the first ones will.
        self._waited = True
        # Per shard: descriptor and first byte of the ids, and of the offsets.
        opened = np.array(
            [self._open(shard) for shard in self._shards], dtype=np.int64
        ).reshape(-1, 4)
        self._tokens_fd, self._tokens_start, self._offsets_fd, self._offsets_start = (
            opened.T.copy()
        )
        ends = np.cumsum([shard.samples for shard in self._shards], dtype=np.int64)
        self._samples = int(ends[-1]) if len(ends) else 0
        self._firsts = np.concatenate(([0], ends[:-1])).astype(np.int64)
        self._tokens = np.array(
            [shard.tokens for shard in self._shards], dtype=np.int64
        )

    @classmethod
    def open(cls, directory: Path, split: SplitName = "train") -> Self:
        """Open a dataset directory."""
        return cls(directory, read_manifest(directory), split)

    def _open(self, shard: Shard) -> tuple[int, int, int, int]:
        tokens = open_npy(self.directory / shard.tokens_file, self.dtype, shard.tokens)
        self._fds.append(tokens[0])
        offsets = open_npy(
            self.directory / shard.offsets_file, np.dtype("uint64"), shard.samples + 1
        )
        self._fds.append(offsets[0])
        return *tokens, *offsets

    def __len__(self) -> int:
        return self._samples

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.directory, self.manifest, self._split))

    def announce(self, samples: Callable[[], Int64]) -> None:
        """Let the kernel prefetch the offsets of samples (N,) needed soon, unless the last reads were in its cache."""
        if not self._waited:
            return
        shards, places = self._offsets_of(samples())
        for fd, place in zip(
            self._offsets_fd[shards].tolist(), places.tolist(), strict=True
        ):
            os.posix_fadvise(fd, place, 16, os.POSIX_FADV_WILLNEED)

    def locate(self, samples: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the location of samples: shard, first id in it, number of ids without special tokens; shapes (N,).

        Raise ``IndexError`` if there is no such sample, ``BadConfig`` if a shard's
        offsets do not ascend within its file, or the file became shorter.
        """
        if (
            len(samples)
            and not 0 <= int(samples.min()) <= int(samples.max()) < self._samples
        ):
            raise IndexError(
                f"samples {samples.min()} to {samples.max()} of {self._samples}"
            )
        shards, places = self._offsets_of(samples)
        pairs = np.empty((len(samples), 2), dtype="<u8")
        firsts = 16 * np.arange(len(samples))
        self._read_all(pairs, self._offsets_fd[shards], places, firsts, firsts + 16)
        begins, ends = pairs.astype(np.int64).T.copy()
        wrong = (begins < 0) | (begins > ends) | (ends > self._tokens[shards])
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            local = int(samples[first] - self._firsts[shards[first]])
            file = self._shards[int(shards[first])].offsets_file
            raise self._corrupt(file, f"the offsets of sample {local} exceed the shard")
        return shards, begins, ends - begins

    def _offsets_of(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return the shards of samples, and the byte position of each one's two offsets in its shard's file."""
        shards = np.searchsorted(self._firsts, samples, side="right") - 1
        return shards, self._offsets_start[shards] + 8 * (
            samples - self._firsts[shards]
        )

    def read_into(
        self, ids: Ids, places: Int64, shards: Int64, begins: Int64, tokens: Int64
    ) -> None:
        """Read ``tokens`` ids of located samples (N,) to ``places`` in ``ids`` (T,).

        Raise as ``locate``.
        """
        size = self.dtype.itemsize
        offsets = self._tokens_start[shards] + begins * size
        self._read_all(
            ids,
            self._tokens_fd[shards],
            offsets,
            places * size,
            (places + tokens) * size,
        )

    def _read_all(
        self,
        target: npt.NDArray[Any],
        fds: Int64,
        offsets: Int64,
        firsts: Int64,
        ends: Int64,
    ) -> None:
        """Fill ``target``'s bytes from ``firsts`` to ``ends`` with those at ``offsets`` of the files.

        Reads that hit the page cache come first. The kernel prefetches the others
        together, so that a batch of reads waits about as long as one. Raise
        ``BadConfig`` if a read reaches the end of its file.
        """
        view = memoryview(target.reshape(-1).view(np.uint8).data)
        reads = list(
            zip(
                fds.tolist(),
                offsets.tolist(),
                firsts.tolist(),
                ends.tolist(),
                strict=True,
            )
        )
        waiting = _read_cached(view, reads)
        self._waited = len(waiting) > 0
        for fd, offset, first, end in waiting:
            os.posix_fadvise(fd, offset, end - first, os.POSIX_FADV_WILLNEED)
        for fd, offset, first, end in waiting:
            if os.preadv(fd, (view[first:end],), offset) != end - first:
                shard, of_offsets = divmod(self._fds.index(fd), 2)
                one = self._shards[shard]
                raise self._corrupt(
                    one.offsets_file if of_offsets else one.tokens_file,
                    "became shorter while in use",
                )

    def read(self, sample: int, max_tokens: int | None = None) -> Ids:
        """Return the ids of one sample, at most ``max_tokens``, without special tokens.

        Raise as ``locate`` does.
        """
        shards, begins, tokens = self.locate(np.array([sample], dtype=np.int64))
        count = tokens if max_tokens is None else np.minimum(tokens, max_tokens)
        ids = np.empty(int(count[0]), dtype=self.dtype)
        self.read_into(ids, np.zeros(1, dtype=np.int64), shards, begins, count)
        return ids

    def drop_page_cache(self) -> None:
        """Drop the files from the page cache, as far as the kernel allows, so that the next reads come from disk."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.fsync(fd)  # unsynced pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())

    def _corrupt(self, file: str, what: str) -> BadConfig:
        next_step = (
            "The dataset is corrupt. Find all faults: autotune data verify"
            f" {self.directory}"
        )
        return BadConfig(f"{self.directory / file}: {what}", next_step=next_step)


def _read_cached(
    view: memoryview, reads: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Perform the reads that hit the page cache; return the others."""
    waiting = []
    for number, one in enumerate(reads):
        fd, offset, first, end = one
        try:
            if os.preadv(fd, (view[first:end],), offset, os.RWF_NOWAIT) != end - first:
                waiting.append(one)
        except BlockingIOError:
            waiting.append(one)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # This file system does not support it.
            return [*waiting, *reads[number:]]
    return waiting


def open_npy(path: Path, dtype: np.dtype[Any], length: int) -> tuple[int, int]:
    """Open a one-dimensional ``.npy`` file.

    Return its descriptor and the first byte of its data.

    The header is read here, not by ``numpy.load``, so that only numbers are loaded.
    Raise ``BadConfig`` if it is wrong.
    """
    corrupt = "The dataset is corrupt. Prepare or copy it again."
    try:
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BadConfig(
            f"cannot read {path}: {error.strerror}", next_step=corrupt
        ) from error
    try:
        head = io.BytesIO(os.pread(fd, 4096, 0))
        versions = {
            (1, 0): npy.read_array_header_1_0,
            (2, 0): npy.read_array_header_2_0,
        }
        if (
            not head.getvalue().startswith(npy.MAGIC_PREFIX)
            or (version := npy.read_magic(head)) not in versions
        ):
            raise ValueError("not an .npy file")
        shape, fortran_order, found = versions[version](head)
        if found != dtype or shape != (length,) or fortran_order:
            raise ValueError(
                f"contains {found.str} of shape {shape}, not {dtype.str} of ({length},)"
            )
        if os.fstat(fd).st_size != head.tell() + length * dtype.itemsize:
            raise ValueError("its size does not match its header")
        # Reads are random, so read-ahead would only evict other data from the page
        # cache.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except (ValueError, TypeError, SyntaxError, TokenError) as error:
        os.close(fd)
        raise BadConfig(f"{path}: {error}", next_step=corrupt) from error
    return fd, head.tell()
