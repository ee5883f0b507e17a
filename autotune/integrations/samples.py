"""The worst case of a dataset: the longest of its samples, as often as needed."""

from collections.abc import Mapping, Sequence
from typing import Any

LOOKED_AT = 2000
"""Samples among which the longest is sought, spread over the dataset."""


class Longest(Sequence[Any]):
    """A dataset of ``count`` samples, each the longest of another dataset, a map-style one."""

    def __init__(self, dataset: Any, count: int) -> None:  # noqa: ANN401 - anything with a length and items
        self._count = count
        step = max(1, len(dataset) // LOOKED_AT)
        self.sample = max((dataset[number] for number in range(0, len(dataset), step)), key=size_of)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:  # noqa: ANN401 - the dataset's own
        if number >= self._count:
            raise IndexError(number)
        return self.sample


def size_of(sample: Any) -> int:  # noqa: ANN401 - a sample of any kind
    """Return the number of elements of a sample: of tensors, lists and strings, in a dictionary or a tuple."""
    if isinstance(sample, Mapping):
        return sum(map(size_of, sample.values()))
    if hasattr(sample, "numel"):
        return int(sample.numel())
    if isinstance(sample, str | bytes):
        return len(sample)
    return sum(map(size_of, sample)) if isinstance(sample, Sequence) else 1
