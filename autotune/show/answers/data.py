"""What ``autotune data … --json`` answers. Lengths are in tokens, special tokens not counted unless a name says so."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.dataset import LengthHistogram, Shard, SourceStatistics, SpecialIds, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAnswer:
    """``data prepare``: a dataset that was made."""

    path: str
    dataset_hash: str
    samples: int
    """Of the training split."""
    tokens: int
    validation_samples: int
    validation_tokens: int
    vocab_size: int
    """Ids, a multiple of 64."""
    used_vocab_size: int
    unknown_tokens: int
    raw_bytes: int
    """Size of the files read, each counted whole."""
    token_bytes: int
    """Size of all stored ids."""
    reduction: float
    """Share of the raw bytes that is gone."""
    mask_bytes_not_stored: int
    """What attention masks would add, a byte for each token."""
    padded_with_masks_bytes: int
    """What ids and masks take when every sample is padded to 512."""
    duplicates: int
    """Samples that were left out because they are there already."""
    empty: int
    truncated: int
    split: int
    files: int
    """Files that gave at least one sample."""
    other_files: int
    """Files of other kinds, not read."""
    rejected: int
    """Files, or lines and rows of files, that could not be used."""
    rejects: str
    """Where they are listed."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedSplit:
    """The samples of one purpose."""

    shards: list[Shard]
    length_histogram: LengthHistogram
    samples: int
    tokens: int


def inspected_split(split: Split) -> InspectedSplit:
    """A split with what it sums up to."""
    return InspectedSplit(
        shards=split.shards, length_histogram=split.length_histogram, samples=split.samples, tokens=split.tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedRowLength:
    """What a row length does to the sampled samples; all but ``packing_gain`` are shares."""

    row_tokens: int
    """Places in a row, for special tokens too."""
    padded_waste: float
    """Of places that are padding when every sample has a row of its own."""
    cut_samples: float
    """Of samples that do not fit a row."""
    cut_tokens: float
    """Of tokens that are lost by that."""
    packed_efficiency: float
    """Of places that are real tokens in packed rows."""
    packing_gain: float
    """Real tokens of a packed row over those of a padded row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectAnswer:
    """``data inspect``: the manifest, and what row lengths do to the samples."""

    schema_version: int
    dtype: str
    """Of stored ids."""
    vocab_size: int
    """Rows of the model's embedding table: a multiple of 64."""
    used_vocab_size: int
    """Ids below this one are the tokenizer's."""
    special_ids: SpecialIds
    tokenizer_sha256: str
    train: InspectedSplit
    validation: InspectedSplit
    source: SourceStatistics
    path: str
    dataset_hash: str
    sampled: int
    """Samples whose lengths were read, drawn at random."""
    percentiles: Mapping[str, int]
    """Tokens of a sample, by percentile."""
    mean_tokens: float
    longest_tokens: int
    rows: tuple[InspectedRowLength, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong with a dataset."""

    file: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedAnswer:
    """``data verify``: whether a dataset is what its manifest says."""

    path: str
    dataset_hash: str
    files: int
    """That were read."""
    bytes_read: int
    faults: tuple[Fault, ...]
    """Empty where the dataset is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedAnswer:
    """``data stage``: a dataset on a local disk. Figures are null where this process copied nothing."""

    path: str
    dataset_hash: str
    copied: bool
    """Whether this process copied it."""
    bytes: int
    copy_s: float | None
    bytes_per_s: float | None
    read_bytes_per_s: float | None
    """Of one thread."""
    write_bytes_per_s: float | None
    source_s_per_sample: float | None
    """Mean time of reading one random sample from the source, by one reader."""
    local_s_per_sample: float | None
    """The same from the copy."""
    break_even_epochs: float | None
    """Epochs of reading after which the copy has paid for itself; null if never, or where nothing was measured."""
    seconds: float
