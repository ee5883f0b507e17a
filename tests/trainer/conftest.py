"""Dataset that tests of the trainer learn from, and a directory for their runs."""

from pathlib import Path

import pytest

from trainer.data.dataset import TokenDataset


@pytest.fixture
def dataset(patterned_dataset) -> TokenDataset:
    return TokenDataset.open(patterned_dataset)


@pytest.fixture
def working_directory(patterned_dataset, tmp_path, monkeypatch):
    """Run the test in its own directory, with a dataset "data"."""
    monkeypatch.chdir(tmp_path)
    Path("data").symlink_to(patterned_dataset)
