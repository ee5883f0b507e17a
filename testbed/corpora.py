"""Datasets for benchmarks, in the documented format.

They have real function lengths, and ids that mean nothing.
"""

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trainer.formats.canonical_json import canonical_json
from trainer.formats.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    LengthHistogram,
    Manifest,
    Shard,
    SourceStatistics,
    SpecialIds,
    Split,
)

Int64 = npt.NDArray[np.int64]

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCAB_SIZE = 16_384
SHARD_TOKENS = 2**28
"""As ``autotune data prepare`` cuts them."""
_NOTHING = Split(shards=[], length_histogram=LengthHistogram(edges=[0], counts=[0]))
LENGTHS_FILE = Path(__file__).with_name("function_lengths.npy")
"""Shape (2, K): lengths in tokens, and how many distinct functions of the programs of a
Debian 12 have each."""


def real_lengths(samples: int, seed: int) -> Int64:
    """Return lengths drawn from those of real functions, shape (samples,).

    Exact duplicates of functions were dropped.
    """
    lengths, counts = np.load(LENGTHS_FILE)
    edges = np.cumsum(counts)
    drawn = np.random.default_rng(seed).integers(0, edges[-1], samples)
    chosen: Int64 = lengths[np.searchsorted(edges, drawn, side="right")].astype(
        np.int64
    )
    return chosen


def write_corpus(directory: Path, lengths: Int64, *, seed: int = 0) -> Path:
    """Write a dataset with random ordinary ids."""
    ids = np.random.default_rng(seed).integers(
        len(SPECIAL_TOKENS), VOCAB_SIZE, int(lengths.sum()), dtype=np.uint16
    )
    _write(directory, VOCAB_SIZE, train=(lengths, ids))
    return directory


def write_sparse_corpus(directory: Path, lengths: Int64) -> Path:
    """Write a dataset whose offsets are real and whose token files are holes.

    Every id is 0, and takes no space on disk.
    """
    _write(directory, VOCAB_SIZE, train=(lengths, None))
    return directory


def write_learnable_corpus(
    directory: Path,
    train_lengths: Int64,
    validation_lengths: Int64,
    *,
    vocab_size: int,
    seed: int = 0,
) -> Path:
    """Write a dataset that a model can learn something of.

    Few ids are frequent, and half of them follow from the one before. Frequencies fall
    with the rank's inverse (Zipf 1949).
    """
    random = np.random.default_rng(seed)
    ordinary = np.arange(len(SPECIAL_TOKENS), vocab_size)
    share = 1 / np.arange(1, len(ordinary) + 1)
    edges = np.cumsum(share) / share.sum()
    follower = np.concatenate(
        [np.arange(len(SPECIAL_TOKENS)), random.permutation(ordinary)]
    )

    def draw(lengths: Int64) -> npt.NDArray[np.uint16]:
        free = ordinary[np.searchsorted(edges, random.random(int(lengths.sum())))]
        follows = random.random(len(free) - 1) < 0.5
        ids = free.copy()
        ids[1:][follows] = follower[free[:-1]][follows]
        return ids.astype(np.uint16)

    _write(
        directory,
        vocab_size,
        train=(train_lengths, draw(train_lengths)),
        validation=(validation_lengths, draw(validation_lengths)),
    )
    return directory


def _write(
    directory: Path,
    vocab_size: int,
    **splits: tuple[Int64, npt.NDArray[np.uint16] | None],
) -> None:
    directory.mkdir(parents=True)
    written = {
        name: _write_split(directory, name, *content)
        for name, content in splits.items()
    }
    words = [
        *SPECIAL_TOKENS,
        *(f"w{number}" for number in range(len(SPECIAL_TOKENS), vocab_size)),
    ]
    tokenizer = Tokenizer(
        WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="[UNK]"
        )
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / TOKENIZER_NAME))
    manifest = synthetic_manifest(vocab_size, **written)
    (directory / MANIFEST_NAME).write_bytes(
        canonical_json(manifest.model_dump(mode="json"))
    )


def _write_split(
    directory: Path, split: str, lengths: Int64, ids: npt.NDArray[np.uint16] | None
) -> Split:
    ends = np.cumsum(lengths)
    shards = []
    for number, (first, end) in enumerate(_shard_edges(ends)):
        offsets = np.concatenate(
            ([0], ends[first:end] - (ends[first] - lengths[first]))
        ).astype(np.uint64)
        begin, tokens = int(ends[first] - lengths[first]), int(offsets[-1])
        names = (
            f"{split}-tokens-{number:05d}.npy",
            f"{split}-offsets-{number:05d}.npy",
        )
        np.save(directory / names[1], offsets)
        if ids is not None:
            np.save(directory / names[0], ids[begin : begin + tokens])
        else:
            _save_hole(directory / names[0], tokens)
        # Opening does not check hashes, and these files are made and removed within one
        # run.
        unknown = "0" * 64
        shards.append(
            Shard(
                tokens_file=names[0],
                offsets_file=names[1],
                samples=end - first,
                tokens=tokens,
                tokens_sha256=unknown,
                offsets_sha256=unknown,
            )
        )
    return Split(
        shards=shards,
        length_histogram=LengthHistogram(edges=[0], counts=[len(lengths)]),
    )


def _shard_edges(ends: Int64) -> list[tuple[int, int]]:
    cuts = np.searchsorted(
        ends, np.arange(SHARD_TOKENS, int(ends[-1]), SHARD_TOKENS)
    ).tolist()
    edges = [0, *cuts, len(ends)]
    return [(first, end) for first, end in itertools.pairwise(edges) if end > first]


def _save_hole(path: Path, tokens: int) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
        )
        file.truncate(file.tell() + 2 * tokens)


def synthetic_manifest(
    vocab_size: int, train: Split = _NOTHING, validation: Split = _NOTHING
) -> Manifest:
    """Return the manifest of ids that mean nothing.

    It has no samples if only its vocabulary is needed.
    """
    return Manifest(
        schema_version=2,
        dtype="uint16",
        vocab_size=-(-vocab_size // 64) * 64,
        used_vocab_size=vocab_size,
        special_ids=SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4),
        tokenizer_sha256="0" * 64,
        train=train,
        validation=validation,
        source=SourceStatistics(
            kinds=["synthetic"],
            files=0,
            rejected=0,
            duplicate_samples=0,
            empty_samples=0,
            truncated_samples=0,
            split_samples=0,
            raw_bytes=0,
            token_bytes=0,
            unknown_tokens=0,
        ),
    )
