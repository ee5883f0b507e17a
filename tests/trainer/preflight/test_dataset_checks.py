"""Warnings of data that training does not use."""

import pytest

from testbed.datasets import write_dataset
from tests.trainer.tiny_models import config_of
from trainer.formats.manifest import read_manifest
from trainer.preflight.dataset_checks import check_data

SHORT_SAMPLES = [[7] * 20] * 9
LONG_SAMPLES = [[7] * 100] * 3
"""Samples of 100 tokens. A sequence of 64 has 62 of them beside two special tokens, so
that 38 % are cut off."""


@pytest.mark.parametrize(
    ("seq_length_tokens", "samples"),
    [
        pytest.param(64, SHORT_SAMPLES, id="short samples"),
        pytest.param(128, LONG_SAMPLES, id="long sequences"),
    ],
)
def test_accepts_samples_that_fit_into_sequences(tmp_path, seq_length_tokens, samples):
    directory = write_dataset(tmp_path / "data", samples)
    config = config_of(seq_length_tokens=seq_length_tokens)
    assert check_data(config, read_manifest(directory), directory) == []


@pytest.mark.parametrize(
    ("settings", "samples", "message"),
    [
        pytest.param(
            {"seq_length_tokens": 64},
            LONG_SAMPLES,
            "38.0% of the tokens",
            id="samples are cut",
        ),
        pytest.param(
            {"evaluation": {"interval_steps": 5}},
            SHORT_SAMPLES,
            "interval_steps = 5 has no effect",
            id="no validation split",
        ),
    ],
)
def test_warns_of_data_that_is_not_used(tmp_path, settings, samples, message):
    directory = write_dataset(tmp_path / "data", samples)
    config = config_of(**settings)
    (warning,) = check_data(config, read_manifest(directory), directory)
    assert message in warning.message
    assert str(directory) in warning.message
    assert warning.level == "warning"
    assert "prepare the dataset again" in warning.next_step.lower()
