"""The tokenised dataset on disk: manifest, shards, and reading them. No torch here.

A dataset is one directory:

    manifest.json      what it holds, with a SHA-256 for every other file
    tokenizer.json     as the ``tokenizers`` library writes it
    tokens-00000.npy   flat ids of all samples of a shard, without special tokens (uint16 or uint32)
    offsets-00000.npy  uint64, one more than the shard has samples: sample i is ids[offsets[i]:offsets[i + 1]]

No attention mask is stored: lengths imply it. Special tokens are added when a sample is read into a row.
"""

import ast
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trainer.errors import BadConfig
from trainer.schema import Table, canonical_sha256, parse_table, read_json

DATASET_SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Names from a manifest never become paths outside its own directory.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class SpecialIds(Table):
    """Ids that have a role in masked-LM training."""

    pad: Count
    unk: Count
    cls: Count
    sep: Count
    mask: Count

    def all(self) -> tuple[int, ...]:
        """Every special id, ascending."""
        return tuple(sorted({self.pad, self.unk, self.cls, self.sep, self.mask}))


class Shard(Table):
    """One pair of files."""

    tokens_file: FileName
    offsets_file: FileName
    samples: Count
    tokens: Count
    tokens_sha256: Sha256
    offsets_sha256: Sha256


class LengthHistogram(Table):
    """How many samples have how many tokens (special tokens not counted).

    ``counts[i]`` samples have a length in ``[edges[i], edges[i + 1])``; the last bin is open-ended.
    """

    edges: list[Count]
    counts: list[Count]


class SourceStatistics(Table):
    """Where the tokens came from and what was left out on the way."""

    kind: str
    files: Count
    rejected_files: Count
    duplicate_samples: Count
    raw_bytes: Count
    token_bytes: Count
    unknown_tokens: Count


class Manifest(Table):
    """``manifest.json``."""

    schema_version: Literal[1]
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Field(gt=0, le=2**31)]
    special_ids: SpecialIds
    tokenizer_sha256: Sha256
    shards: Annotated[list[Shard], Field(min_length=1)]
    length_histogram: LengthHistogram
    source: SourceStatistics

    @property
    def samples(self) -> int:
        """Samples in all shards."""
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Stored tokens in all shards, special tokens not counted."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def dataset_hash(self) -> str:
        """SHA-256 of the manifest's canonical JSON: names the content, as the manifest holds every file's hash."""
        return canonical_sha256(self.model_dump(mode="json"))


def read_manifest(directory: Path) -> Manifest:
    """Read and validate a dataset's manifest.

    Raises:
        BadConfig: If the directory is not a dataset, or one of another schema version.
    """
    path = directory / MANIFEST_NAME
    prepare = "Prepare one with: autotune data prepare elf:/usr/bin --out DIR"
    if not directory.is_dir():
        raise BadConfig(f"{directory} is not a directory", next_step=prepare)
    if not path.is_file():
        raise BadConfig(f"{directory} is not a dataset: it has no {MANIFEST_NAME}", next_step=prepare)
    raw = read_json(path)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != DATASET_SCHEMA_VERSION:
        raise BadConfig(
            f"{path} has schema version {version!r}; this program reads version {DATASET_SCHEMA_VERSION}",
            next_step="Prepare the dataset again with this version of autotune.",
        )
    return parse_table(Manifest, raw, where=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenShard:
    tokens_fd: int
    tokens_start: int
    offsets_fd: int
    offsets_start: int
    first_sample: int


class TokenDataset:
    """Random access to samples by number, with ``pread``: memory does not grow with what was visited.

    Forked processes may share one instance, because no file position is used.

    Raises:
        BadConfig: If a file is missing or is not what the manifest says.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        self._shards: list[_OpenShard] = []
        first = 0
        for shard in manifest.shards:
            tokens_fd, tokens_start = _open_npy(directory / shard.tokens_file, self._dtype, shard.tokens)
            offsets_fd, offsets_start = _open_npy(directory / shard.offsets_file, np.dtype("uint64"), shard.samples + 1)
            self._shards.append(
                _OpenShard(
                    tokens_fd=tokens_fd,
                    tokens_start=tokens_start,
                    offsets_fd=offsets_fd,
                    offsets_start=offsets_start,
                    first_sample=first,
                )
            )
            first += shard.samples
        self._samples = first
        self._firsts = np.array([shard.first_sample for shard in self._shards], dtype=np.int64)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a dataset directory."""
        return cls(directory, read_manifest(directory))

    def __len__(self) -> int:
        return self._samples

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.directory, self.manifest))

    def read(self, sample: int, max_tokens: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The ids of one sample, at most ``max_tokens`` of them, without special tokens.

        Raises:
            IndexError: If there is no such sample.
            BadConfig: If the shard's offsets are not ascending within the file.
        """
        if not 0 <= sample < self._samples:
            raise IndexError(sample)
        index = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        shard = self._shards[index]
        local = sample - shard.first_sample
        begin, end = struct.unpack("<QQ", os.pread(shard.offsets_fd, 16, shard.offsets_start + 8 * local))
        if not begin <= end <= self.manifest.shards[index].tokens:
            raise BadConfig(
                f"{self.directory / self.manifest.shards[index].offsets_file}: sample {local} lies outside the shard",
                next_step="The dataset is damaged: prepare or copy it again.",
            )
        count = min(end - begin, max_tokens)
        size = self._dtype.itemsize
        raw = os.pread(shard.tokens_fd, count * size, shard.tokens_start + begin * size)
        return np.frombuffer(raw, dtype=self._dtype)

    def close(self) -> None:
        """Close the files."""
        for shard in self._shards:
            os.close(shard.tokens_fd)
            os.close(shard.offsets_fd)
        self._shards = []


_NPY_HEADER = re.compile(rb"^\x93NUMPY([\x01\x02])\x00")


def _open_npy(path: Path, dtype: np.dtype[Any], length: int) -> tuple[int, int]:
    """Open a one-dimensional ``.npy`` file; returns its descriptor and where its data begins.

    The header is read here, not by ``numpy.load``, so that nothing in the file can be anything but numbers.
    """
    damaged = "The dataset is damaged: prepare or copy it again."
    try:
        # O_NOFOLLOW: a dataset from elsewhere must not point outside its own directory.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BadConfig(f"cannot read {path}: {error.strerror}", next_step=damaged) from error
    try:
        head = os.pread(fd, 4096, 0)
        match = _NPY_HEADER.match(head)
        if match is None:
            raise ValueError("not an .npy file")
        wide = match[1] == b"\x02"
        (size,) = struct.unpack_from("<I" if wide else "<H", head, 8)
        start = (12 if wide else 10) + size
        header = ast.literal_eval(head[12 if wide else 10 : start].decode("latin1"))
        if np.dtype(header["descr"]) != dtype or header["shape"] != (length,) or header["fortran_order"]:
            raise ValueError(f"holds {header['descr']} of shape {header['shape']}, not {dtype.str} of ({length},)")
        if os.fstat(fd).st_size != start + length * dtype.itemsize:
            raise ValueError("its size is not what its header says")
    except (ValueError, KeyError, SyntaxError, TypeError, struct.error) as error:
        os.close(fd)
        raise BadConfig(f"{path}: {error}", next_step=damaged) from error
    return fd, start
