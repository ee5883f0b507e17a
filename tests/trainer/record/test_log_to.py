"""The setting ``log_to``: names of loggers, which must be installed."""

import subprocess
import sys

import pytest

from trainer.formats.errors import BadConfig
from trainer.formats.tables import parse_table
from trainer.formats.train_config import TrainConfig
from trainer.record import boards

CHECK_IMPORTS = """
import pathlib, sys
import trainer.__main__, trainer.loop
from trainer.record.boards import open_boards
boards = open_boards(
    [], pathlib.Path(sys.argv[1]), header=None, attempt=1, report_event=print
)
assert boards == []
assert not {"tensorboard", "torch.utils.tensorboard", "wandb"} & sys.modules.keys()
"""
"""Fails if the trainer imports a logger that ``log_to`` does not name."""


@pytest.mark.parametrize(
    ("log_to", "suggestion"),
    [
        pytest.param(["wandbb"], "'wandb'", id="misspelt"),
        pytest.param("wandb", "['wandb']", id="not a list"),
    ],
)
def test_rejects_unknown_logger(log_to, suggestion):
    model = {"name": "m", "config": {"model_type": "bert"}}
    with pytest.raises(BadConfig, match="log_to") as raised:
        parse_table(TrainConfig, {"model": model, "log_to": log_to}, where="p.toml")
    assert raised.value.next_step == f"Did you mean {suggestion}?"


def test_rejects_logger_that_is_not_installed(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # as W&B makes for its files: it is not the library
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(
        BadConfig, match="requires wandb, which is not installed"
    ) as raised:
        boards.check_installed(["wandb"])
    assert "pip install '.[wandb]'" in raised.value.next_step


def test_default_needs_no_logger(monkeypatch):
    monkeypatch.setattr(boards, "find_spec", lambda name: None)
    boards.check_installed(None)  # raises no error


def test_unused_loggers_are_not_imported(tmp_path):
    subprocess.run([sys.executable, "-c", CHECK_IMPORTS, str(tmp_path)], check=True)
