"""A dataset to copy, and a local disk to copy it to."""

import pytest

from testbed.datasets import write_dataset

SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]
"""Samples of 1 to 40 tokens: enough that every shard holds others than its
neighbours."""


@pytest.fixture
def source(tmp_path):
    """A dataset of ten files.

    They are tokens and offsets of four shards, one of them for validation, the
    tokenizer and the manifest.
    """
    return write_dataset(tmp_path / "source", SAMPLES, shards=3, validation=[[7, 8]])


@pytest.fixture
def local(tmp_path):
    """An empty directory that stands for a local disk."""
    directory = tmp_path / "local"
    directory.mkdir()
    return directory
