from pathlib import Path

import pytest

from testbed.datasets import write_dataset
from testbed.examples.checkpoints import resolved_of
from tests.trainer.tiny_models import config_of
from trainer.formats.errors import BadConfig
from trainer.formats.manifest import read_manifest
from trainer.formats.train_config import DataSettings
from trainer.preflight.dataset_checks import open_dataset

SAMPLES = [list(range(5, 25))] * 40


@pytest.fixture
def data(tmp_path) -> Path:
    return write_dataset(tmp_path / "data", SAMPLES, vocab_size=128)


@pytest.fixture
def dataset_hash(data) -> str:
    return read_manifest(data).dataset_hash


def test_opens_dataset_of_the_profile(data, dataset_hash):
    config = config_of(data=DataSettings(dataset_hash=dataset_hash))
    assert len(open_dataset(resolved_of(config, data))) == len(SAMPLES)


def test_profile_without_a_hash_opens_any_dataset(data):
    assert len(open_dataset(resolved_of(config_of(), data))) == len(SAMPLES)


def test_rejects_dataset_that_does_not_match_the_profile(data, dataset_hash):
    config = config_of(data=DataSettings(dataset_hash="0" * len(dataset_hash)))
    with pytest.raises(
        BadConfig, match=f"its hash is {dataset_hash[:12]}…, not 000000000000"
    ) as raised:
        open_dataset(resolved_of(config, data))
    assert "--data" in raised.value.next_step


def test_rejects_empty_dataset(tmp_path):
    empty = write_dataset(tmp_path / "empty", [], vocab_size=128)
    with pytest.raises(BadConfig, match="is empty"):
        open_dataset(resolved_of(config_of(), empty))
