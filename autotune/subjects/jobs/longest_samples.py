"""The worst case of a dataset: the longest of its samples, as often as needed."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

LOOKED_AT = 20_000
"""Samples among which the longest is sought, spread over the dataset."""
FIRST_LOOKED_AT = 200
"""Samples that end the search if all are of one size, as images are, and reading them
takes long."""
SHORT_S = 0.02


class Longest(Sequence[Any]):
    """A dataset whose samples are all the longest sample of a map-style dataset."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._count = count
        began_s = time.perf_counter()
        sizes = _sizes(dataset, FIRST_LOOKED_AT)
        if len(set(sizes.values())) > 1 or time.perf_counter() - began_s < SHORT_S:
            sizes |= _sizes(dataset, LOOKED_AT)
        self.sample = dataset[max(sizes, key=lambda number: sizes[number])]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if number >= self._count:
            raise IndexError(number)
        return copy.copy(self.sample)  # a collator may take fields out of it


def _sizes(dataset: Any, most: int) -> dict[int, int]:
    """Return sizes of samples that are spread over a dataset, by their number."""
    spread = (len(dataset) * number // most for number in range(most))
    return {number: size_of(dataset[number]) for number in dict.fromkeys(spread)}


def size_of(sample: Any) -> int:
    """Return the number of elements of a sample.

    It counts tensors, arrays, images, lists and strings, in any container.
    """
    if isinstance(sample, Mapping):
        return sum(map(size_of, sample.values()))
    if hasattr(sample, "numel"):
        return int(sample.numel())
    # Of NumPy's arrays and PIL's images.
    if isinstance(size := getattr(sample, "size", None), int | tuple):
        return math.prod(size) if isinstance(size, tuple) else size
    if isinstance(sample, str | bytes):
        return len(sample)
    return sum(map(size_of, sample)) if isinstance(sample, Sequence) else 1
