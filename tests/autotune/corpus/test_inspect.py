import numpy as np
import pytest

from autotune.corpus.inspect import inspect
from tests.conftest import write_dataset


def test_figures_are_those_of_the_lengths(tmp_path):
    lengths = [30] * 60 + [126] * 30 + [500] * 10
    directory = write_dataset(tmp_path / "data", [[5] * length for length in lengths])
    found = inspect(directory, [64, 128])
    assert found.sampled == 100
    assert (found.percentiles[50], found.percentiles[99], found.longest_tokens) == (30, 500, 500)
    assert found.mean_tokens == pytest.approx(np.mean(lengths))
    narrow, wide = found.rows
    assert narrow.cut_samples == pytest.approx(0.4)
    assert wide.cut_samples == pytest.approx(0.1)
    # 60 of 32 tokens make 30 rows of 64; the other 40 fill a row each.
    assert narrow.packed_efficiency == 1.0
    assert narrow.padded_waste == pytest.approx(1 - (60 * 32 + 40 * 64) / 6400)
    assert narrow.packing_gain == pytest.approx(100 / 70)
    assert wide.cut_tokens == pytest.approx(10 * (502 - 128) / sum(lengths))


def test_an_empty_training_split_has_no_figures(tmp_path):
    directory = write_dataset(tmp_path / "data", [], shards=0, validation=[[5, 6]])
    found = inspect(directory)
    assert (found.sampled, found.rows, found.percentiles) == (0, (), {})
