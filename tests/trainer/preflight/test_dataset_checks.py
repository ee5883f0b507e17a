import pytest

from testbed.datasets import write_dataset
from tests.trainer.oracles import config_of
from trainer.data.manifest import read_manifest
from trainer.preflight.dataset_checks import check_data

SHORT_SAMPLES = [[7] * 20] * 9
LONG_SAMPLES = [[7] * 100] * 3
"""Samples of 100 tokens. A sequence of 64 has 62 of them beside two special tokens, so
that 38 % are cut off."""


@pytest.mark.parametrize(
    ("settings", "samples", "messages"),
    [
        pytest.param({}, SHORT_SAMPLES, [], id="nothing cut"),
        pytest.param({}, LONG_SAMPLES, ["38.0% of the tokens"], id="cut"),
        pytest.param({"seq_length_tokens": 128}, LONG_SAMPLES, [], id="long enough"),
        pytest.param(
            {"evaluation": {"interval_steps": 5}},
            SHORT_SAMPLES,
            ["interval_steps = 5 has no effect"],
            id="no validation",
        ),
    ],
)
def test_warns_of_data_that_is_not_used(tmp_path, settings, samples, messages):
    directory = write_dataset(tmp_path / "data", samples)
    config = config_of(**{"seq_length_tokens": 64, **settings})
    warnings = check_data(config, read_manifest(directory), directory)
    assert len(warnings) == len(messages)
    for warning, message in zip(warnings, messages, strict=True):
        assert message in warning.message
        assert str(directory) in warning.message
        assert warning.level == "warning"
        assert "prepare the dataset again" in warning.next_step.lower()
