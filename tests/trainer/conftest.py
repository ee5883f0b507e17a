"""Dataset that tests of the trainer learn from."""

import pytest

from trainer.data.dataset import TokenDataset


@pytest.fixture
def dataset(patterned_dataset) -> TokenDataset:
    return TokenDataset.open(patterned_dataset)
