from pathlib import Path

import pytest

from tests.conftest import write_dataset
from tests.trainer.oracles import config_of
from trainer.config import ResolvedConfig
from trainer.loop import train
from trainer.parallel import join_ranks
from trainer.record import RunWriter, read_run


class _Nobody:
    def begin(self, header) -> None: ...
    def step(self, row) -> None: ...
    def evaluation(self, row) -> None: ...
    def event(self, row) -> None: ...


def _run(data: Path, out: Path, **changes):
    config = config_of(**changes)
    resolved = ResolvedConfig(config=config, sources={}, data_dir=data, profile_sha256="0" * 64)
    train(resolved, join_ranks(config, environment={}), RunWriter(out, active=True), _Nobody())
    return read_run(out)


def test_an_epoch_ends_when_every_sample_was_seen_however_few_rows_a_step_takes(tmp_path):
    """Lanes end one by one, so a step of few rows can be empty long before the data is over."""
    samples = [[5 + (start + step) % 60 for step in range(4 + start % 50)] for start in range(4200)]
    data = write_dataset(tmp_path / "d", samples, vocab_size=128)
    run = _run(data, tmp_path / "r", global_batch_rows=4, micro_batch_rows=4, max_epochs=1, max_steps=5000)
    assert sum(row.real_tokens for row in run.steps) == sum(len(sample) + 2 for sample in samples)
    assert run.steps[-1].step == len(run.steps) < 5000


@pytest.mark.parametrize("interval", [3, 100])
def test_steps_after_the_last_logged_one_are_logged_when_the_data_ends(interval, tmp_path):
    samples = [[5 + (start + step) % 60 for step in range(20)] for start in range(100)]
    data = write_dataset(tmp_path / "d", samples, vocab_size=128, validation=samples[:9])
    run = _run(data, tmp_path / "r", layout="padded", max_epochs=1, max_steps=1000, log_interval_steps=interval)
    assert run.steps[-1].step == 13  # of 8 rows, the last of them half empty
    assert run.evaluations[-1].step == 13
    assert (tmp_path / "r" / "model" / "config.json").is_file()
