"""Batches of a window: cached ones, their size, and loaders that end."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from autotune.workers.jobs import batches
from autotune.workers.jobs.batches import (
    CACHED_BATCHES,
    CACHED_BYTES,
    FEWEST_CACHED,
    Epochs,
    bytes_of,
    cached,
)
from trainer.formats.errors import BadConfig


@dataclass
class TensorBatch:
    ids: torch.Tensor
    rows: int


def test_cached_batches_repeat_the_first_ones():
    first = list(range(CACHED_BATCHES))
    endless = cached(itertools.count())
    assert list(itertools.islice(endless, 2 * CACHED_BATCHES)) == 2 * first


def test_large_batches_are_cached_fewer():
    # It has no memory, as its elements are one element.
    large = torch.zeros(1).expand(CACHED_BYTES)
    numbered = ({"number": number, "image": large} for number in itertools.count())
    kept = itertools.islice(cached(numbered), 2 * FEWEST_CACHED)
    assert [batch["number"] for batch in kept] == 2 * list(range(FEWEST_CACHED))


def test_slow_batches_are_cached_fewer():
    kept = itertools.islice(cached(itertools.count(), enough_s=0.0), 2 * FEWEST_CACHED)
    assert list(kept) == 2 * list(range(FEWEST_CACHED))


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(10),
        {"x": [torch.zeros(6)], "y": (torch.zeros(4), "name")},
        TensorBatch(ids=torch.zeros(10), rows=2),
    ],
    ids=["tensor", "containers", "dataclass"],
)
def test_counts_bytes_of_tensors_in_containers(batch):
    assert bytes_of(batch) == 40


def test_loader_begins_again_after_an_epoch():
    epochs = Epochs([1, 2], "m:loader")
    assert list(itertools.islice(epochs, 5)) == [1, 2, 1, 2, 1]
    assert epochs.epoch_batches == 2


def test_rejects_loader_that_ends_for_good():
    with pytest.raises(BadConfig, match="has no batches after 2 batches"):
        list(Epochs(iter([1, 2]), "m:loader"))


def test_drains_nothing_without_workers():
    assert batches.drain(iter(()), 0) == 0
