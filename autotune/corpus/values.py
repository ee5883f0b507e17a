"""Sizes of a dataset: its vocabulary, how long its samples are, and what a row length does to them. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.dataset import Manifest, SpecialIds

# Rows of pretraining encoders end at a few thousand tokens: fine below, coarse beyond.
HISTOGRAM_EDGES: tuple[int, ...] = (*range(0, 1024, 8), *(2**power for power in range(10, 21)))
SPECIAL_TOKENS_PER_SAMPLE = 2
"""A sample becomes [CLS] ids [SEP] when it is read into a row."""

DEFAULT_VOCAB_SIZE = 16_384
"""Words of a learned tokenizer. Of 101 M tokens from 615 programs 0.4 % were unknown, and an id takes two bytes."""
MIN_VOCAB_SIZE = 16
"""Room for the special tokens, the separator and a few instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """Sample lengths in tokens, special tokens not counted: ``counts[i]`` samples lie in ``[edges[i], edges[i + 1])``.

    A bin is taken as evenly filled with whole numbers, the last one, which has no end, as at its lower edge. So a mean
    is off by half the span of the widest bin below the truncation: 3.5 tokens by ``HISTOGRAM_EDGES`` up to 1,024.
    """

    edges: Sequence[int]
    counts: Sequence[int]

    @property
    def samples(self) -> int:
        """All samples."""
        return sum(self.counts)

    def mean_tokens(self, truncated_at: int | None = None) -> float | None:
        """Mean tokens per sample, each cut to ``truncated_at`` first; None when there are no samples."""
        if self.samples == 0:
            return None
        return sum(count * _bin_mean(low, last, truncated_at) for low, last, count in self._bins()) / self.samples

    def percentile_tokens(self, share: float) -> float | None:
        """The length that a share, 0 to 1, of the samples do not exceed, to within its bin; None without samples."""
        rank, below = share * self.samples, 0
        for low, last, count in self._bins():
            if count and below + count >= rank:
                return low + (last - low) * (rank - below) / count
            below += count
        return None

    def truncated_share(self, tokens: int) -> float | None:
        """The share of samples longer than ``tokens``, to within its bin; None when there are no samples."""
        if self.samples == 0:
            return None
        shares = (count * min(max((last - tokens) / (last - low + 1), 0.0), 1.0) for low, last, count in self._bins())
        return sum(shares) / self.samples

    def padding_waste(self, row_tokens: int) -> float | None:
        """The share of a batch that is padding when every sample is cut and padded to ``row_tokens``.

        Special tokens are real ones. None when there are no samples.

        Raises:
            ValueError: If a row has no room beside the special tokens.
        """
        if row_tokens <= SPECIAL_TOKENS_PER_SAMPLE:
            raise ValueError(f"a row of {row_tokens} tokens holds nothing beside the special tokens")
        mean = self.mean_tokens(row_tokens - SPECIAL_TOKENS_PER_SAMPLE)
        return None if mean is None else 1 - (mean + SPECIAL_TOKENS_PER_SAMPLE) / row_tokens

    def _bins(self) -> Iterator[tuple[int, int, int]]:
        """First and last whole number of each bin, and its count; the open one counts at its edge."""
        lasts = (*(high - 1 for high in self.edges[1:]), *self.edges[-1:])
        return zip(self.edges, lasts, self.counts, strict=True)


def _bin_mean(first: int, last: int, truncated_at: int | None) -> float:
    """Mean of min(x, truncated_at) over the whole numbers from first to last."""
    if truncated_at is None or last <= truncated_at:
        return (first + last) / 2
    if first >= truncated_at:
        return float(truncated_at)
    below = truncated_at - first
    total = below * (first + truncated_at - 1) / 2 + (last - truncated_at + 1) * truncated_at
    return total / (last - first + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLength:
    """What a row length does to the sampled samples; all but the gain are shares."""

    row_tokens: int
    padded_waste: float
    """Of positions that are padding if every sample has a row of its own."""
    cut_samples: float
    """Of samples that do not fit a row."""
    cut_tokens: float
    """Of tokens that are lost by that."""
    packed_efficiency: float
    """Of positions that are non-padding tokens in packed rows."""
    packing_gain: float
    """Non-padding tokens of a packed row over those of a padded row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """What a dataset holds; lengths are in tokens, special tokens not counted."""

    manifest: "Manifest"
    sampled: int
    percentiles: dict[int, int]
    mean_tokens: float
    longest_tokens: int
    rows: tuple[RowLength, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowContents:
    """Of a dataset, a part of which was laid out; or assumed, for want of one."""

    vocab_size: int
    special_ids: "SpecialIds"
    mean_non_padding_tokens: float
    mean_samples: float
    documents: float
    """In the fullest micro-batches."""
    dataset_hash: str | None
    """None where all of it is assumed."""

    @property
    def assumed(self) -> bool:
        """Whether nobody looked at a dataset."""
        return self.dataset_hash is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsHold:
    """What a row holds, on average; None if unknown."""

    non_padding_tokens: float | None
    samples: float | None
    source: str
