"""Manifest of a tokenised dataset, and the files it describes. No torch here.

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

import itertools
import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.formats.canonical_json import canonical_sha256
from trainer.formats.errors import BadConfig, unreadable
from trainer.formats.raw_files import preparation_of
from trainer.formats.tables import StrictTable, nearest, parse_table, read_json

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

SplitName = Literal["train", "validation"]

Count = Annotated[int, Field(ge=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Names from a manifest must not lead out of its directory.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class SpecialIds(StrictTable):
    """Ids of the special tokens, by their role in masked-LM training."""

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
    """Number of stored ids, special tokens not counted."""
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

        The share is an estimate, as the histogram has no exact lengths. Samples within
        the limit count as the middle of their bin. The estimate stays within the bounds
        that the bins of longer samples set.

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
        for bin_index, count in enumerate(self.length_histogram.counts):
            shortest = edges[bin_index]
            is_open_ended = bin_index + 1 == len(edges)
            longest = shortest if is_open_ended else edges[bin_index + 1] - 1
            kept_tokens += count * min((shortest + longest) / 2, limit_tokens)
            least_lost_tokens += count * max(0, shortest - limit_tokens)
            if is_open_ended and count:
                # These samples may be of any length.
                most_lost_tokens = self.tokens
            else:
                most_lost_tokens += count * max(0, longest - limit_tokens)
        lost_tokens = self.tokens - kept_tokens
        lost_tokens = min(max(lost_tokens, least_lost_tokens), most_lost_tokens)
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
    """Number of stored ids that are [UNK]."""


class Manifest(StrictTable):
    """Content of ``manifest.json``."""

    schema_version: Literal[2]  # DATASET_SCHEMA_VERSION; a literal type takes no name
    dtype: Literal["uint16", "uint32"]
    """Type of the stored ids."""
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
    if directory.is_dir():
        message = f"{directory} is not a dataset: {MANIFEST_NAME} not found"
    elif directory.is_file():
        message = f"{directory} is a raw file, not a prepared dataset"
        next_step = preparation_of(directory).next_step()
    else:
        message = f"dataset not found: {os.path.normpath(directory)}"
        similar_directory = _similar_dataset(directory)
        if similar_directory is not None:
            next_step = f"Did you mean {similar_directory}?"
    return BadConfig(message, next_step=next_step, docs=_DOCS)


def _similar_dataset(directory: Path) -> Path | None:
    """Return the dataset beside a missing one whose name is nearest to it, if any."""
    manifests = directory.parent.glob(f"*/{MANIFEST_NAME}")
    names = sorted(manifest.parent.name for manifest in manifests)
    similar_name = nearest(directory.name, names)
    return directory.parent / similar_name if similar_name else None
