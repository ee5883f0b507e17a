import pytest

from testbed.datasets import write_dataset
from tests.trainer.oracles import config_of
from trainer.data.manifest import read_manifest
from trainer.preflight.dataset_checks import check_data

LONG_SAMPLES = [[7] * 100] * 3


@pytest.mark.parametrize(
    ("settings", "samples", "messages"),
    [
        pytest.param({}, [[7] * 20] * 9, [], id="nothing cut"),
        pytest.param({}, LONG_SAMPLES, ["38.0% of the tokens"], id="cut"),
        pytest.param({"seq_length_tokens": 128}, LONG_SAMPLES, [], id="long enough"),
        pytest.param(
            {"evaluation": {"interval_steps": 5}},
            [[7] * 20] * 9,
            ["interval_steps = 5 has no effect"],
            id="no validation",
        ),
    ],
)
def test_warns_of_data_that_is_not_used(tmp_path, settings, samples, messages):
    directory = write_dataset(tmp_path / "data", samples)
    config = config_of(**({"seq_length_tokens": 64} | settings))
    warnings = check_data(config, read_manifest(directory), directory)
    assert len(warnings) == len(messages)
    for warning, message in zip(warnings, messages, strict=True):
        assert message in warning.message
        assert str(directory) in warning.message
        assert warning.level == "warning"
        assert "Prepare" in warning.next_step or "prepare" in warning.next_step
