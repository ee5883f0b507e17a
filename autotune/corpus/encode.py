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
from autotune.corpus.tokenizer import load_tokenizer
from autotune.corpus.values import HISTOGRAM_EDGES
from autotune.corpus.workplace import Receipt, Workplace
from autotune.errors import InternalError
from trainer.formats.manifest import TOKENIZER_NAME, Shard

ENCODE = "encode"
SPLITS = ("train", "validation")
# A batch of texts to encode, large enough for full speed and small enough for any
# memory.
_BATCH_CHARACTERS = 2**20
# 512 MiB of uint16: few files, each small enough to copy and check in parallel.
SHARD_TOKENS = 2**28
SHARD_SAMPLES = 2**24

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
        starts = range(0, len(ids), self.max_tokens)
        return [
            ids[one : one + self.max_tokens]
            for one in (starts[:1] if self.long == "truncate" else starts)
        ]


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
    paths, *selected = selection.of(workplace, number)
    receipt: Receipt = {}
    for name, wanted in zip(SPLITS, selected, strict=True):
        counts = np.zeros(len(HISTOGRAM_EDGES), dtype=np.int64)
        said = dict.fromkeys(
            ("samples", "tokens", "unknown", "empty", "truncated", "split"), 0
        )
        with (
            (directory / f"{name}.ids").open("wb") as id_file,
            (directory / f"{name}.lengths").open("wb") as size_file,
        ):
            for batch in _batches(paths.read_samples(wanted)):
                stored: list[Ids] = []
                for ids in tokenizer.encode(batch):
                    if not len(ids):
                        said["empty"] += 1
                        continue
                    samples = limit.applied(ids)
                    said["split" if len(samples) > 1 else "truncated"] += len(
                        samples
                    ) > 1 or len(samples[0]) < len(ids)
                    stored += samples
                if not stored:
                    continue
                lengths = np.array([len(ids) for ids in stored], dtype="<u4")
                joined = np.concatenate(stored)
                id_file.write(
                    joined.astype(np.dtype(tokenizer.dtype).newbyteorder("<")).tobytes()
                )
                size_file.write(lengths.tobytes())
                bins = np.searchsorted(HISTOGRAM_EDGES, lengths, side="right") - 1
                counts += np.bincount(bins, minlength=len(counts))
                said["samples"] += len(stored)
                said["tokens"] += len(joined)
                said["unknown"] += int(
                    np.count_nonzero(joined == tokenizer.special_ids.unk)
                )
        receipt[name] = {**said, "histogram": counts.tolist()}
    return receipt


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield texts in groups of about the same number of characters.

    Lengths vary a thousandfold.
    """
    batch, characters = list[str](), 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def shard_edges(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the range of whole pieces of each shard (first, one after the last).

    ``sizes`` are the samples and tokens of each piece.
    """
    edges: list[tuple[int, int]] = []
    first = samples = tokens = 0
    for number, (more_samples, more_tokens) in enumerate(sizes):
        if samples and (
            samples + more_samples > SHARD_SAMPLES
            or tokens + more_tokens > SHARD_TOKENS
        ):
            edges.append((first, number))
            first, samples, tokens = number, 0, 0
        samples, tokens = samples + more_samples, tokens + more_tokens
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
    ids = (
        content for source in sources for content in _chunks(source / f"{split}.ids")
    )
    receipt: Receipt = {"samples": samples, "tokens": tokens}
    for kind, array, length, contents in (
        ("tokens", dtype, tokens, ids),
        ("offsets", "<u8", samples + 1, _offsets(sources, split)),
    ):
        receipt[f"{kind}_file"] = name = f"{split}-{kind}-{shard:05d}.npy"
        # A one-dimensional array of little-endian numbers after numpy's header.
        header, hashed = io.BytesIO(), hashlib.sha256()
        shape = {
            "descr": np.dtype(array).newbyteorder("<").str,
            "fortran_order": False,
            "shape": (length,),
        }
        np.lib.format.write_array_header_1_0(header, shape)
        with (directory / name).open("xb", buffering=2**20) as file:
            for content in itertools.chain([header.getvalue()], contents):
                hashed.update(content)
                file.write(content)
        receipt[f"{kind}_sha256"] = hashed.hexdigest()
    return receipt


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while content := file.read(2**22):
            yield content


def _offsets(sources: Sequence[Path], split: str) -> Iterator[bytes]:
    yield bytes(8)
    end = np.uint64(0)
    for source in sources:
        with (source / f"{split}.lengths").open("rb") as file:
            while len(lengths := np.fromfile(file, dtype="<u4", count=2**20)):
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
