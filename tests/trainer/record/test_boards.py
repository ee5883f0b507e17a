import errno
import json
import os
import subprocess
import sys

import pytest

from testbed.examples.checkpoints import header_of, release_run
from testbed.examples.run_rows import evaluation_of, row_of
from tests.trainer.record.wandb_files import records_of
from trainer.config.tables import parse_table
from trainer.config.train_config import TrainConfig
from trainer.errors import BadConfig
from trainer.record import boards
from trainer.record.run_record import TENSORBOARD_DIRECTORY, read_run
from trainer.record.writer import RunWriter

# Program that logs a loss to W&B in its argument, and prints messages of events.
LOG_TO_WANDB = """
import pathlib, sys
from testbed.examples.checkpoints import header_of
from trainer.record.boards import open_boards
events = []
directory = pathlib.Path(sys.argv[1])
(board,) = open_boards(["wandb"], directory, header_of(), 1, events.append)
board.add(1, {"train/loss": 2.5})
board.close()
print([event.message for event in events])
"""
# Program that fails if the trainer imports a logger that it does not use.
CHECK_IMPORTS = """
import pathlib, sys
import trainer.__main__, trainer.loop
from trainer.record.boards import open_boards
assert open_boards([], pathlib.Path(sys.argv[1]), None, 1, print) == []
assert not {"tensorboard", "torch.utils.tensorboard", "wandb"} & sys.modules.keys()
"""


class FullBoard:
    """Board whose disk is full."""

    name = "wandb"

    def add(self, step, numbers):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def logged_to_tensorboard(directory):
    """Return the values that TensorBoard shows, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    values = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            values[name, scalar.step] = scalar.value
    return values


def logged_to_wandb(directory):
    """Return the values in W&B's files, by name and step; all are of one W&B run."""
    values = {}
    run_ids = set()
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in records_of(path.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                run_ids.add(record.run.run_id)
            for item in record.history.item:
                name = item.nested_key[0] if item.nested_key else item.key
                if not name.startswith("_"):  # such as the time, which W&B adds
                    step = record.history.step.num
                    values[name, step] = json.loads(item.value_json)
    assert len(run_ids) == 1
    return values


def write_start(directory, logger, attempt, rows, report_event):
    """Write the rows of one start of a run, which are also logged to a board."""
    writer = RunWriter(directory, may_resume=True)
    # Each start takes one step, on its own day.
    header = header_of(
        resumed_step=attempt - 1, started_utc=f"2026-01-0{attempt}T00:00:00Z"
    )
    log_to = [logger, logger]  # is opened once
    opened = boards.open_boards(log_to, directory, header, attempt, report_event)
    writer.start(header, boards=opened)
    for row in rows:
        writer.append(row)
    writer.close()
    release_run(writer)


def numbers_of(group, row):
    """Return the numbers of a row that a board logs, by name and step."""
    numbers = row.model_dump(exclude={"step"}, exclude_none=True)
    return {(f"{group}/{name}", row.step): value for name, value in numbers.items()}


@pytest.mark.parametrize(
    ("logger", "logged"),
    [
        pytest.param("tensorboard", logged_to_tensorboard, id="tensorboard"),
        pytest.param("wandb", logged_to_wandb, id="wandb"),
    ],
)
def test_logger_gets_numbers_of_all_starts(tmp_path, monkeypatch, logger, logged):
    library = pytest.importorskip(logger)
    monkeypatch.setenv("WANDB_MODE", "offline")
    failures = []
    first = row_of(1, loss=2.5)
    evaluation = evaluation_of(1)
    second = row_of(2, loss=None)
    write_start(tmp_path, logger, 1, [first, evaluation], failures.append)
    write_start(tmp_path, logger, 2, [second], failures.append)
    if logger == "wandb":
        library.teardown()  # ends its child process
    assert failures == []
    expected = {
        **numbers_of("train", first),
        **numbers_of("validation", evaluation),
        **numbers_of("train", second),
    }
    assert logged(tmp_path) == pytest.approx(expected)


@pytest.fixture
def log_to_wandb(tmp_path):
    """Function that logs a loss to W&B in another process.

    It returns the messages of the events that were reported, as text.
    """
    pytest.importorskip("wandb")

    def log(**environment):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in {"WANDB_MODE", "WANDB_API_KEY"}
        }
        process = subprocess.run(
            [sys.executable, "-c", LOG_TO_WANDB, str(tmp_path)],
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
    assert logged_to_wandb(tmp_path) == {("train/loss", 1): 2.5}


@pytest.mark.slow
def test_wandb_writes_files_without_its_server(tmp_path, log_to_wandb):
    messages = log_to_wandb(
        WANDB_API_KEY="a" * 40,  # of a valid length
        WANDB_BASE_URL="http://127.0.0.1:9",  # nothing listens there
        WANDB_INIT_TIMEOUT="1",
    )
    assert "cannot log to wandb online" in messages
    assert logged_to_wandb(tmp_path) == {("train/loss", 1): 2.5}


def test_tensorboard_is_the_default_board(tmp_path):
    pytest.importorskip("tensorboard")
    writer = RunWriter(tmp_path / "r")
    opened = boards.open_boards(None, tmp_path / "r", header_of(), 1, pytest.fail)
    writer.start(header_of(), boards=opened)
    writer.append(row_of(1))
    writer.close()
    assert list((tmp_path / "r" / TENSORBOARD_DIRECTORY).iterdir())


def test_tensorboard_hides_points_of_earlier_starts(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    purge_steps = []
    monkeypatch.setattr(
        tensorboard,
        "SummaryWriter",
        lambda **options: purge_steps.append(options["purge_step"]),
    )
    for attempt in (1, 2):
        boards.open_boards(
            None, tmp_path, header_of(resumed_step=5), attempt, pytest.fail
        )
    assert purge_steps == [None, 6]


def test_failed_board_is_reported_once(tmp_path):
    writer = RunWriter(tmp_path)
    writer.start(header_of(), boards=[FullBoard()])
    writer.append(row_of(1))
    writer.append(row_of(2))
    run = read_run(tmp_path)
    assert len(run.steps) == 2
    assert [(event.kind, event.step) for event in run.events] == [("board_failed", 1)]
    assert "No space left on device; training continues" in run.events[0].message


def test_board_that_cannot_close_ends_no_run(tmp_path):
    writer = RunWriter(tmp_path)
    writer.start(header_of(), boards=[FullBoard()])
    writer.close()


def test_board_that_cannot_open_is_reported(tmp_path, monkeypatch):
    events = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert boards.open_boards(["wandb"], tmp_path, header_of(), 1, events.append) == []
    assert [event.kind for event in events] == ["board_failed"]


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
    boards.check_installed(None)


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


def test_unused_loggers_are_not_imported(tmp_path):
    subprocess.run([sys.executable, "-c", CHECK_IMPORTS, str(tmp_path)], check=True)
