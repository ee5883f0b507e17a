"""Time to read samples of a dataset, by which source and copy are compared."""

import contextlib
import time
from pathlib import Path

import numpy as np

from trainer.data.dataset import TokenDataset
from trainer.data.permutation import permute

_MEASURED_SAMPLES = 512
"""Samples whose mean read time is measured."""
_MEASURED_TOKENS = 512
"""Longest part of a sample that is read to measure it."""


def seconds_per_sample(directory: Path) -> float | None:
    """Measure the mean time to read a sample, with a cold page cache, in seconds.

    The samples are random, but always the same.

    Returns:
        None if there are no samples.
    """
    with contextlib.closing(TokenDataset.open(directory)) as dataset:
        count = min(_MEASURED_SAMPLES, len(dataset))
        if not count:
            return None
        indices = np.arange(count, dtype=np.uint64)
        samples = permute(indices, len(dataset), seed=1, epoch=0).astype(np.int64)
        dataset.drop_page_cache()
        started_s = time.perf_counter()
        for sample in samples.tolist():
            dataset.read(sample, _MEASURED_TOKENS)
        return (time.perf_counter() - started_s) / count
