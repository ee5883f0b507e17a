"""One piece of text to ids: the part of training, the part of validation, and what there is to say of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from autotune.core.dataset import HISTOGRAM_EDGES
from autotune.corpus.distinct import kept_samples, read_pieces
from autotune.corpus.pieces import read_index, read_samples
from autotune.corpus.split import ValidationSplit
from autotune.corpus.tokenizer import DatasetTokenizer, load_tokenizer
from autotune.corpus.workplace import Receipt, UnfinishedTask, Workplace

STAGE = "encode"
TOKENIZER_FILE = "tokenizer.json"
SPLITS = ("train", "validation")
# A batch of texts to encode: large enough for the tokenizer to run at its speed, small enough for any memory.
_BATCH_CHARACTERS = 2**20

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimit:
    """What becomes of long samples: cut, with the rest left out, or split into several."""

    max_tokens: int | None
    long: Literal["truncate", "split"]

    def applied(self, ids: Ids) -> list[Ids]:
        """The samples that one sample becomes."""
        if self.max_tokens is None or len(ids) <= self.max_tokens:
            return [ids]
        if self.long == "truncate":
            return [ids[: self.max_tokens]]
        return [ids[first : first + self.max_tokens] for first in range(0, len(ids), self.max_tokens)]


def encode_piece(
    workplace: Workplace,
    task: UnfinishedTask,
    *,
    number: int,
    buckets: int,
    split: ValidationSplit,
    limit: LengthLimit,
) -> Receipt:
    """Encode the samples of one piece that are to be used."""
    tokenizer = load_tokenizer(workplace.path / TOKENIZER_FILE)
    piece = read_pieces(workplace)[number]
    paths = piece.paths(workplace)
    kept = kept_samples(workplace, piece, number, buckets)
    validation = split.chosen(read_index(paths))
    receipt: Receipt = {}
    for name, wanted in zip(SPLITS, (kept & ~validation, kept & validation), strict=True):
        texts = read_samples(paths, wanted)
        with (
            (task.directory / f"{name}.ids").open("wb") as ids,
            (task.directory / f"{name}.lengths").open("wb") as lengths,
        ):
            receipt[name] = _encode(texts, tokenizer, limit, ids, lengths)
    return receipt


def _encode(
    texts: Iterator[str], tokenizer: DatasetTokenizer, limit: LengthLimit, ids_file: BinaryIO, lengths_file: BinaryIO
) -> dict[str, Any]:
    counts = np.zeros(len(HISTOGRAM_EDGES), dtype=np.int64)
    said = dict.fromkeys(("samples", "tokens", "unknown", "empty", "truncated", "split"), 0)
    dtype = np.dtype(tokenizer.dtype)
    for batch in _batches(texts):
        stored: list[Ids] = []
        for ids in tokenizer.encode(batch):
            if not len(ids):
                said["empty"] += 1
                continue
            samples = limit.applied(ids)
            said["split" if len(samples) > 1 else "truncated"] += len(samples) > 1 or len(samples[0]) < len(ids)
            stored += samples
        if not stored:
            continue
        lengths = np.array([len(ids) for ids in stored], dtype="<u4")
        joined = np.concatenate(stored)
        ids_file.write(joined.astype(dtype.newbyteorder("<")).tobytes())
        lengths_file.write(lengths.tobytes())
        bins = np.searchsorted(HISTOGRAM_EDGES, lengths, side="right") - 1
        counts += np.bincount(bins, minlength=len(counts))
        said["samples"] += len(stored)
        said["tokens"] += len(joined)
        said["unknown"] += int(np.count_nonzero(joined == tokenizer.special_ids.unk))
    return {**said, "histogram": counts.tolist()}


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in groups of about the same number of characters: one can be as long as a thousand others."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
