"""A dataset to copy, and a local disk to copy it to."""

import pytest

from testbed.datasets import write_dataset

SAMPLES = [[5 + number % 90] * (1 + number % 40) for number in range(2000)]


@pytest.fixture
def source(tmp_path):
    return write_dataset(tmp_path / "source", SAMPLES, shards=3, validation=[[7, 8]])


@pytest.fixture
def local(tmp_path):
    (tmp_path / "local").mkdir()
    return tmp_path / "local"
