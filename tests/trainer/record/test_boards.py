import errno
import json
import os
import struct
import subprocess
import sys

import pytest

from testbed.examples.checkpoints import header_of, release_run
from testbed.examples.run_rows import evaluation_of, row_of
from trainer.config.tables import parse_table
from trainer.config.train_config import TrainConfig
from trainer.errors import BadConfig
from trainer.record import boards
from trainer.record.run_record import read_run
from trainer.record.writer import RunWriter


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
    """Return the values in W&B's files, by name and step."""
    values = {}
    run_ids = set()
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in _wandb_records(path.read_bytes()):
            if record.WhichOneof("record_type") == "run":
                run_ids.add(record.run.run_id)
            for item in record.history.item:
                name = item.nested_key[0] if item.nested_key else item.key
                if not name.startswith("_"):
                    step = record.history.step.num
                    values[name, step] = json.loads(item.value_json)
    assert len(run_ids) == 1
    return values


WANDB_HEADER_BYTES = 7
WANDB_BLOCK_BYTES = 2**15
RECORD_HEADER_BYTES = 7
WHOLE_RECORD = 1
LAST_PART = 4
"""Types of the parts after which a record is complete."""


def _wandb_records(content):
    """Yield the records of a W&B file.

    After a header, it is a log in LevelDB's format: blocks of 32 KiB, at whose ends
    records are split into parts. Each part begins with its checksum (4 bytes), size
    and type.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    position = WANDB_HEADER_BYTES
    record_content = b""
    while position + RECORD_HEADER_BYTES <= len(content):
        left_in_block = WANDB_BLOCK_BYTES - position % WANDB_BLOCK_BYTES
        if left_in_block < RECORD_HEADER_BYTES:
            position += left_in_block
            continue
        size, part_type = struct.unpack_from("<HB", content, position + 4)
        begin = position + RECORD_HEADER_BYTES
        record_content += content[begin : begin + size]
        position = begin + size
        if part_type in (WHOLE_RECORD, LAST_PART):
            record = Record()
            record.ParseFromString(record_content)
            yield record
            record_content = b""


def write_start(directory, logger, attempt, rows, report):
    """Write the rows of one start of a run, which are also logged to a board."""
    writer = RunWriter(directory, active=True, again=True)
    header = header_of(
        resumed_step=attempt - 1, started_utc=f"2026-01-0{attempt}T00:00:00Z"
    )
    # A logger that is named twice is opened once.
    opened = boards.open_boards([logger, logger], directory, header, attempt, report)
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


@pytest.mark.parametrize(
    "lacks", ["API key", pytest.param("server", marks=pytest.mark.slow)]
)
def test_wandb_writes_files_when_offline(tmp_path, lacks):
    pytest.importorskip("wandb")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"WANDB_MODE", "WANDB_API_KEY"}
    }
    environment["HOME"] = str(tmp_path)  # which may have a key in .netrc
    if lacks == "server":
        environment["WANDB_BASE_URL"] = "http://127.0.0.1:9"  # nothing listens there
        environment["WANDB_INIT_TIMEOUT"] = "1"
        environment["WANDB_API_KEY"] = "a" * 40
    process = subprocess.run(
        [sys.executable, "-c", LOG_TO_WANDB, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    reported = "cannot log to wandb online" in process.stdout
    assert reported == (lacks == "server")
    assert logged_to_wandb(tmp_path) == {("train/loss", 1): 2.5}


class FullBoard:
    """Board whose disk is full."""

    name = "wandb"

    def add(self, step, numbers):
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_board_is_reported_once(tmp_path):
    writer = RunWriter(tmp_path, active=True)
    writer.start(header_of(), boards=[FullBoard()])
    writer.append(row_of(1))
    writer.append(row_of(2))
    run = read_run(tmp_path)
    assert len(run.steps) == 2
    assert [(event.kind, event.step) for event in run.events] == [("board_failed", 1)]
    assert "No space left on device; training continues" in run.events[0].message


def test_board_that_cannot_close_ends_no_run(tmp_path):
    writer = RunWriter(tmp_path, active=True)
    writer.start(header_of(), boards=[FullBoard()])
    writer.close()


def test_board_that_cannot_open_is_reported(tmp_path, monkeypatch):
    events = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert boards.open_boards(["wandb"], tmp_path, header_of(), 1, events.append) == []
    assert [event.kind for event in events] == ["board_failed"]


def test_rejects_logger_that_is_not_installed(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # a directory of W&B's files is not its library
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(
        BadConfig, match="requires wandb, which is not installed"
    ) as raised:
        boards.check_installed(["wandb"])
    assert "pip install '.[wandb]'" in raised.value.next_step
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


CHECK_IMPORTS = """
import pathlib, sys
import trainer.__main__, trainer.loop
from trainer.record.boards import open_boards
assert open_boards([], pathlib.Path(sys.argv[1]), None, 1, print) == []
assert not {"tensorboard", "torch.utils.tensorboard", "wandb"} & sys.modules.keys()
"""


def test_unused_loggers_are_not_imported(tmp_path):
    subprocess.run([sys.executable, "-c", CHECK_IMPORTS, str(tmp_path)], check=True)
