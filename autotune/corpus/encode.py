"""Encoding of pieces of text, and assembly of encoded pieces to shards.

Pieces become ids with statistics, and encoded pieces become the shards of a dataset.
"""

import hashlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from autotune.corpus.pieces import Selection
from autotune.corpus.tokenizer import DatasetTokenizer, load_tokenizer
from autotune.corpus.values import HISTOGRAM_EDGES
from autotune.corpus.workplace import Receipt, Workplace
from autotune.errors import InternalError
from trainer.formats.manifest import TOKENIZER_NAME, Shard

ENCODE = "encode"
"""Name of the stage."""
SPLITS = ("train", "validation")
_BATCH_CHARACTERS = 2**20
"""Characters of texts to encode at once: enough for full speed, and few enough for any
memory."""
SHARD_TOKENS = 2**28
"""Most tokens of a shard, 512 MiB of uint16: few files, each small enough to copy and
check in parallel."""
SHARD_SAMPLES = 2**24
"""Most samples of a shard."""
_COPIED_BYTES = 2**22
"""Bytes that are copied at once."""
_LENGTHS_AT_ONCE = 2**20
"""Sample lengths that are read at once."""

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimit:
    """Limit of sample lengths.

    Longer samples are cut to the limit, or split into several.
    """

    max_tokens: int | None
    long: Literal["truncate", "split"]

    def applied(self, ids: Ids) -> list[Ids]:
        """Return the samples that one sample becomes."""
        if self.max_tokens is None:
            return [ids]
        if self.long == "truncate":
            return [ids[: self.max_tokens]]
        starts = range(0, len(ids), self.max_tokens)
        return [ids[start : start + self.max_tokens] for start in starts]


def encode_piece(
    workplace: Workplace,
    directory: Path,
    *,
    number: int,
    selection: Selection,
    limit: LengthLimit,
) -> Receipt:
    """Encode the selected samples of one piece."""
    tokenizer = load_tokenizer(workplace.path / TOKENIZER_NAME)
    paths, train, validation = selection.of(workplace, number)
    receipt: Receipt = {}
    for split, selected in (("train", train), ("validation", validation)):
        texts = paths.read_samples(selected)
        receipt[split] = _encode_split(directory, split, texts, tokenizer, limit)
    return receipt


def _encode_split(
    directory: Path,
    split: str,
    texts: Iterable[str],
    tokenizer: DatasetTokenizer,
    limit: LengthLimit,
) -> Receipt:
    """Write the ids and lengths of a split's samples; return their counts."""
    id_type = np.dtype(tokenizer.dtype).newbyteorder("<")
    histogram = np.zeros(len(HISTOGRAM_EDGES), dtype=np.int64)
    counts = dict.fromkeys(
        ("samples", "tokens", "unknown", "empty", "truncated", "split"), 0
    )
    with (
        (directory / f"{split}.ids").open("wb") as id_file,
        (directory / f"{split}.lengths").open("wb") as length_file,
    ):
        for batch in _batches(texts):
            stored: list[Ids] = []
            for ids in tokenizer.encode(batch):
                if not len(ids):
                    counts["empty"] += 1
                    continue
                samples = limit.applied(ids)
                if len(samples) > 1:
                    counts["split"] += 1
                elif len(samples[0]) < len(ids):
                    counts["truncated"] += 1
                stored += samples
            if not stored:
                continue
            lengths = np.array([len(ids) for ids in stored], dtype="<u4")
            joined = np.concatenate(stored)
            id_file.write(joined.astype(id_type).tobytes())
            length_file.write(lengths.tobytes())
            bins = np.searchsorted(HISTOGRAM_EDGES, lengths, side="right") - 1
            histogram += np.bincount(bins, minlength=len(histogram))
            is_unknown = joined == tokenizer.special_ids.unk
            counts["samples"] += len(stored)
            counts["tokens"] += len(joined)
            counts["unknown"] += int(np.count_nonzero(is_unknown))
    return {**counts, "histogram": histogram.tolist()}


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts in groups of about the same number of characters.

    Lengths vary a thousandfold.
    """
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def shard_edges(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the range of whole pieces of each shard (first, one after the last).

    ``sizes`` are the samples and tokens of each piece.
    """
    edges: list[tuple[int, int]] = []
    first = 0
    samples = 0
    tokens = 0
    for number, (piece_samples, piece_tokens) in enumerate(sizes):
        has_room = (
            samples + piece_samples <= SHARD_SAMPLES
            and tokens + piece_tokens <= SHARD_TOKENS
        )
        if samples and not has_room:
            edges.append((first, number))
            first = number
            samples = 0
            tokens = 0
        samples += piece_samples
        tokens += piece_tokens
    if samples:
        edges.append((first, len(sizes)))
    return edges


def assemble_shard(
    workplace: Workplace,
    directory: Path,
    *,
    split: str,
    shard: int,
    pieces: tuple[int, int],
    samples: int,
    tokens: int,
    dtype: str,
) -> Receipt:
    """Join the pieces of a shard into its two files."""
    sources = [workplace.directory(ENCODE, number) for number in range(*pieces)]
    tokens_file = f"{split}-tokens-{shard:05d}.npy"
    tokens_sha256 = _write_npy(
        directory / tokens_file, dtype, tokens, _token_bytes(sources, split)
    )
    offsets_file = f"{split}-offsets-{shard:05d}.npy"
    offsets_sha256 = _write_npy(
        directory / offsets_file, "<u8", samples + 1, _offset_bytes(sources, split)
    )
    return {
        "samples": samples,
        "tokens": tokens,
        "tokens_file": tokens_file,
        "tokens_sha256": tokens_sha256,
        "offsets_file": offsets_file,
        "offsets_sha256": offsets_sha256,
    }


def _write_npy(path: Path, dtype: str, length: int, contents: Iterable[bytes]) -> str:
    """Write a one-dimensional array of little-endian numbers after numpy's header.

    Returns:
        The SHA-256 of the file.
    """
    header = io.BytesIO()
    description = {
        "descr": np.dtype(dtype).newbyteorder("<").str,
        "fortran_order": False,
        "shape": (length,),
    }
    np.lib.format.write_array_header_1_0(header, description)
    file_hash = hashlib.sha256()
    with path.open("xb", buffering=2**20) as file:
        for content in itertools.chain([header.getvalue()], contents):
            file_hash.update(content)
            file.write(content)
    return file_hash.hexdigest()


def _token_bytes(sources: Sequence[Path], split: str) -> Iterator[bytes]:
    """Yield the ids of encoded pieces, one after the other."""
    for source in sources:
        with (source / f"{split}.ids").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while content := file.read(_COPIED_BYTES):
                yield content


def _offset_bytes(sources: Sequence[Path], split: str) -> Iterator[bytes]:
    """Yield 0 and the position after each sample of encoded pieces."""
    yield bytes(8)
    end = np.uint64(0)
    for source in sources:
        with (source / f"{split}.lengths").open("rb") as file:
            while True:
                lengths = np.fromfile(file, dtype="<u4", count=_LENGTHS_AT_ONCE)
                if not len(lengths):
                    break
                ends = end + np.cumsum(lengths, dtype="<u8")
                yield ends.tobytes()
                end = ends[-1]


def gather(workplace: Workplace, directory: Path, shard: Shard) -> None:
    """Move a shard's files to the dataset unless an earlier run did.

    Raises:
        InternalError: If a file is in neither place.
    """
    for name in (shard.tokens_file, shard.offsets_file):
        if (directory / name).exists():
            (directory / name).rename(workplace.dataset / name)
        if not (workplace.dataset / name).exists():
            next_step = f"Remove {workplace.path} and run the command again."
            raise InternalError(f"{name} not found in {directory}", next_step=next_step)
