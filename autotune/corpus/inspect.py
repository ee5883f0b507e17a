"""What is in a dataset, and what row lengths do to it; from its manifest and a bounded look at its offsets."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from autotune.core.dataset import SPECIAL_TOKENS_PER_SAMPLE, Inspected, RowLength
from trainer.dataset import TokenDataset
from trainer.plan import MIN_BLOCK_SAMPLES, pack_rows, permute

Int64 = npt.NDArray[np.int64]

DEFAULT_ROW_TOKENS = (128, 512, 1024, 2048)
SAMPLED = 65_536
"""Samples whose lengths are read: a second's work on a cold disk, and enough for three digits."""


def inspect(directory: Path, row_tokens: Sequence[int] = DEFAULT_ROW_TOKENS) -> Inspected:
    """Look at a dataset.

    Args:
        directory: The dataset.
        row_tokens: Row lengths to consider.

    Raises:
        BadConfig: If it is no dataset.
    """
    dataset = TokenDataset.open(directory)
    count = min(SAMPLED, len(dataset))
    # The first of a seeded permutation: a fair choice, and the same every time.
    samples = permute(np.arange(count, dtype=np.uint64), max(1, len(dataset)), 0, 0).astype(np.int64)
    lengths = dataset.locate(samples)[2]
    dataset.close()
    some = len(lengths) > 0
    return Inspected(
        manifest=dataset.manifest,
        sampled=count,
        percentiles={p: int(np.percentile(lengths, p, method="lower")) for p in (10, 50, 75, 90, 99)} if some else {},
        mean_tokens=float(lengths.mean()) if some else 0.0,
        longest_tokens=int(lengths.max(initial=0)),
        rows=tuple(_row_length(lengths, tokens) for tokens in row_tokens) if some else (),
    )


def _row_length(lengths: Int64, row_tokens: int) -> RowLength:
    framed = lengths + SPECIAL_TOKENS_PER_SAMPLE
    cut = np.minimum(framed, row_tokens)
    block = max(MIN_BLOCK_SAMPLES, row_tokens)  # as the feed packs them
    blocks = [cut[first : first + block] for first in range(0, len(cut), block)]
    rows = sum(int(pack_rows(part, row_tokens).max()) + 1 for part in blocks)
    real = int(cut.sum())
    padded = real / (len(cut) * row_tokens)
    packed = real / (rows * row_tokens)
    return RowLength(
        row_tokens=row_tokens,
        padded_waste=1 - padded,
        cut_samples=float((framed > row_tokens).mean()),
        cut_tokens=float((framed - cut).sum() / max(1, int(lengths.sum()))),
        packed_efficiency=packed,
        packing_gain=packed / padded,
    )
