"""W&B without an API key or its server, in a process with an environment of its own."""

import os
import subprocess
import sys

import pytest

from tests.trainer.record.wandb_files import numbers_logged_to_wandb

LOGGED_NUMBERS = {("train/loss", 1): 2.5}
"""Number that the program logs, by name and step."""
PROGRAM = """
import pathlib, sys
from testbed.examples.checkpoints import header_of
from trainer.record.boards import open_boards
events = []
directory = pathlib.Path(sys.argv[1])
(board,) = open_boards(
    ["wandb"], directory, header_of(), attempt=1, report_event=events.append
)
board.add(1, {"train/loss": 2.5})
board.close()
print([event.message for event in events])
"""
"""Logs a loss to W&B in the directory of its argument, and prints the messages of the
events that were reported."""


@pytest.fixture
def log_to_wandb(tmp_path):
    """Function that runs the program with environment variables.

    It returns the messages that the program prints, as text.
    """
    pytest.importorskip("wandb")

    def log(**environment):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in {"WANDB_MODE", "WANDB_API_KEY"}
        }
        process = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            stdin=subprocess.DEVNULL,
            # Your own home directory may have an API key in .netrc.
            env={**inherited, "HOME": str(tmp_path), **environment},
        )
        return process.stdout

    return log


def test_wandb_writes_files_without_an_api_key(tmp_path, log_to_wandb):
    messages = log_to_wandb()
    assert "cannot log to wandb online" not in messages
    assert numbers_logged_to_wandb(tmp_path) == LOGGED_NUMBERS


@pytest.mark.slow
def test_wandb_writes_files_without_its_server(tmp_path, log_to_wandb):
    messages = log_to_wandb(
        WANDB_API_KEY="a" * 40,  # of a valid length
        WANDB_BASE_URL="http://127.0.0.1:9",  # nothing listens there
        WANDB_INIT_TIMEOUT="1",
    )
    assert "cannot log to wandb online" in messages
    assert numbers_logged_to_wandb(tmp_path) == LOGGED_NUMBERS
