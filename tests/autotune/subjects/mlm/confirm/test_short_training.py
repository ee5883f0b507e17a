"""A short training delivers the rate of its logged steps."""

import importlib.metadata

import numpy as np
import pytest

from autotune.profiles.toml_file import profile_to_toml
from autotune.subjects.mlm.confirm.short_training import ShortTraining, figures_of
from autotune.subjects.mlm.confirm.values import ShortTrainingRequest
from autotune.trials.job_figures import ShortTrainingFigures
from autotune.trials.outcomes import Crashed, Measured
from testbed.datasets import write_dataset
from testbed.examples.profiles import but, example_profile
from testbed.examples.run_rows import row_of
from trainer.formats.train_config import DataSettings, ModelSettings

TINY = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def test_delivered_rate_leaves_out_the_first_row():
    rows = [
        row_of(10, step_s=9.0, non_padding_tokens=100),
        row_of(20, step_s=1.0, non_padding_tokens=100, mfu=0.4),
        row_of(30, step_s=3.0, non_padding_tokens=300, mfu=0.2),
    ]
    # 1,000 tokens in 10 s, and 3,000 in 30 s.
    delivered = figures_of(rows)
    assert delivered.tokens_per_s == pytest.approx(100.0)
    assert (delivered.steps, delivered.seconds) == (20, 40.0)
    assert delivered.mfu == pytest.approx(0.25)


def test_rate_on_a_cpu_has_no_mfu():
    delivered = figures_of([row_of(1), row_of(2)])
    assert delivered.mfu is None


def test_rows_without_tokens_deliver_nothing():
    rows = [row_of(step, non_padding_tokens=0) for step in (1, 2)]
    assert figures_of(rows).tokens_per_s is None


@pytest.mark.parametrize("rows", [[], [row_of(10)]])
def test_first_row_alone_delivers_nothing(rows):
    assert figures_of(rows).tokens_per_s is None


@pytest.fixture
def short_training(tmp_path):
    """Return a function that trains a tiny model; it takes fields that differ."""
    rng = np.random.default_rng(0)
    samples = rng.integers(5, 512, (400, 62)).tolist()
    data = write_dataset(tmp_path / "data", samples, vocab_size=512)
    settings = {
        "model": ModelSettings(name="tiny", config=TINY),
        "seq_length_tokens": 64,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "max_steps": 100_000,
        "data": DataSettings(path="data"),
    }
    profile = but(example_profile(), train=settings)
    profile_path = tmp_path / "tiny.toml"
    profile_path.write_text(profile_to_toml(profile))

    def train(seconds, data=data):
        training = ShortTraining(
            profile=profile_path,
            data=data,
            torch_version=importlib.metadata.version("torch"),
        )
        request = ShortTrainingRequest(
            config=profile.train, seconds=seconds, step_s=0.02, local_ranks=1
        )
        return training.run_trial(request.trial(timeout_s=seconds + 60.0))

    return train


@pytest.mark.system
def test_trains_with_the_trainers_own_loop(short_training):
    # A start takes long on a busy machine.
    for seconds in (20.0, 60.0, 180.0):
        outcome = short_training(seconds)
        assert isinstance(outcome, Measured), outcome
        delivered = ShortTrainingFigures.of(outcome)
        if delivered.tokens_per_s is not None:
            break
    assert delivered.steps >= 2
    assert delivered.tokens_per_s > 0


@pytest.mark.system
def test_too_short_a_time_delivers_nothing(short_training):
    outcome = short_training(0.5)
    assert isinstance(outcome, Measured), outcome
    assert ShortTrainingFigures.of(outcome).tokens_per_s is None


@pytest.mark.system
def test_failed_training_quotes_its_log(short_training, tmp_path):
    outcome = short_training(60.0, data=tmp_path / "absent")
    assert isinstance(outcome, Crashed)
    assert "training ended with code" in outcome.detail
    assert "absent" in outcome.detail
