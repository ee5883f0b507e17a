"""Write a dataset's files into a directory: shards as they fill, the manifest last. Memory stays that of one batch."""

import hashlib
import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from autotune.core.dataset import HISTOGRAM_EDGES
from autotune.corpus.tokenizer import DatasetTokenizer
from trainer.dataset import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    LengthHistogram,
    Manifest,
    Shard,
    SourceStatistics,
)
from trainer.schema import canonical_json

# 128 MiB of uint16: large enough to read in sequence, small enough to copy and check in parallel.
SHARD_TOKENS = 2**26
# Bounds the offsets that wait in memory for their shard's end, 32 MiB of them.
SHARD_SAMPLES = 2**22
_HEADER_BYTES = 128


class DatasetWriter:
    """Streams samples into shards.

    Args:
        directory: An existing, empty directory.
        tokenizer: What encoded the samples.
        shard_tokens: A shard is closed by the first sample that reaches this many tokens.
        shard_samples: ... or this many samples.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: DatasetTokenizer,
        *,
        shard_tokens: int = SHARD_TOKENS,
        shard_samples: int = SHARD_SAMPLES,
    ) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self._dtype: np.dtype[Any] = np.dtype(tokenizer.dtype)
        self._shard_tokens, self._shard_samples = shard_tokens, shard_samples
        self._shards: list[Shard] = []
        self._counts = np.zeros(len(HISTOGRAM_EDGES), dtype=np.int64)
        self._tokens_file: BinaryIO | None = None
        self._offsets = array("Q", [0])

    def add(self, ids: npt.NDArray[np.uint32]) -> None:
        """Append one sample."""
        if self._tokens_file is None:
            self._tokens_file = (self._directory / self._name("tokens")).open("xb")
            self._tokens_file.write(bytes(_HEADER_BYTES))
        self._tokens_file.write(ids.astype(self._dtype).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        self._counts[int(np.searchsorted(HISTOGRAM_EDGES, len(ids), side="right")) - 1] += 1
        if self._offsets[-1] >= self._shard_tokens or len(self._offsets) > self._shard_samples:
            self._close_shard()

    @property
    def token_bytes(self) -> int:
        """Bytes of the ids added so far."""
        tokens = sum(shard.tokens for shard in self._shards) + self._offsets[-1]
        return tokens * self._dtype.itemsize

    def finish(self, source: SourceStatistics) -> Manifest:
        """Close the last shard and write the tokenizer and the manifest; every file is on disk then."""
        if self._tokens_file is not None:
            self._close_shard()
        write_durably(self._directory / TOKENIZER_NAME, self._tokenizer.content)
        manifest = Manifest(
            schema_version=1,
            dtype=self._tokenizer.dtype,
            vocab_size=self._tokenizer.vocab_size,
            special_ids=self._tokenizer.special_ids,
            tokenizer_sha256=self._tokenizer.sha256,
            shards=self._shards,
            length_histogram=LengthHistogram(edges=list(HISTOGRAM_EDGES), counts=self._counts.tolist()),
            source=source,
        )
        write_durably(self._directory / MANIFEST_NAME, canonical_json(manifest.model_dump(mode="json")) + b"\n")
        return manifest

    def close(self) -> None:
        """Close an unfinished shard's file; what it holds is not a dataset."""
        if self._tokens_file is not None:
            self._tokens_file.close()

    def _name(self, kind: str) -> str:
        return f"{kind}-{len(self._shards):05d}.npy"

    def _close_shard(self) -> None:
        assert self._tokens_file is not None
        tokens, samples = self._offsets[-1], len(self._offsets) - 1
        with self._tokens_file as file:
            file.seek(0)
            file.write(npy_header(self._dtype, tokens))
            file.flush()
            os.fsync(file.fileno())
        self._tokens_file = None
        offsets = npy_header(np.dtype("<u8"), samples + 1) + np.array(self._offsets, dtype="<u8").tobytes()
        write_durably(self._directory / self._name("offsets"), offsets)
        self._shards.append(
            Shard(
                tokens_file=self._name("tokens"),
                offsets_file=self._name("offsets"),
                samples=samples,
                tokens=tokens,
                tokens_sha256=file_sha256(self._directory / self._name("tokens")),
                offsets_sha256=hashlib.sha256(offsets).hexdigest(),
            )
        )
        self._offsets = array("Q", [0])


def npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    """The header of a one-dimensional ``.npy`` file, always of the same size so that it can be written again."""
    text = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({length},), }}"
    padded_bytes = _HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + padded_bytes.to_bytes(2, "little") + text.ljust(padded_bytes - 1).encode() + b"\n"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
