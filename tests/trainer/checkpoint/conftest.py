"""Runs and checkpoint managers that tests of several files begin with."""

import errno
import os
from unittest.mock import Mock

import pytest

from testbed.examples.checkpoints import write_run
from tests.trainer.checkpoint.saves import save
from tests.trainer.checkpoint.starts import CONFIG
from tests.trainer.tiny_models import config_of, training_of
from trainer.checkpoint.format import CHECKPOINTS_DIRECTORY
from trainer.checkpoint.manager import CheckpointManager
from trainer.formats.train_config import CheckpointSettings
from trainer.runtime.ranks import join_ranks


@pytest.fixture
def directory_without_runs(tmp_path, monkeypatch):
    """Working directory without runs, in which a job looks for its own in ``runs``."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture
def run(tmp_path):
    """A run of 20 steps that was killed after its 10th.

    It has checkpoints of steps 5 and 10.
    """
    return write_run(tmp_path / "r", CONFIG, steps=(5, 10))


@pytest.fixture
def training(dataset):
    return training_of(config_of(), dataset)


@pytest.fixture
def events():
    """Events that managers have reported."""
    return []


@pytest.fixture
def root(tmp_path):
    """Directory of the checkpoints of a manager."""
    return tmp_path / CHECKPOINTS_DIRECTORY


@pytest.fixture
def manager_of(training, tmp_path, events):
    """Return a function that makes managers with given settings."""

    def make(directory=tmp_path, **settings) -> CheckpointManager:
        config = config_of(checkpoint=CheckpointSettings(**settings))
        ranks = join_ranks(config, environment={})
        return CheckpointManager(
            directory, config, training, ranks, attempt=1, report_event=events.append
        )

    return make


@pytest.fixture
def fail_to_save(monkeypatch):
    """Return a function that saves to a disk which fails; it is full by default."""

    def save_on_bad_disk(manager, step, error_number=errno.ENOSPC):
        error = OSError(error_number, os.strerror(error_number))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", Mock(side_effect=error))
            save(manager, step)

    return save_on_bad_disk
