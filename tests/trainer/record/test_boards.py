import errno
import json
import struct
import subprocess
import sys

import pytest

from testbed.examples.checkpoints import header_of, leave
from testbed.examples.run_rows import evaluation_of, row_of
from trainer.config.tables import parse_table
from trainer.config.train_config import TrainConfig
from trainer.errors import BadConfig
from trainer.record import boards
from trainer.record.run_record import read_run
from trainer.record.writer import RunWriter


def drawn_on_tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        (name, one.step): one.value
        for name in events.Tags()["scalars"]
        for one in events.Scalars(name)
    }


def drawn_on_wandb(directory):
    """Numbers in W&B's files, which are logs of records in blocks of 32 KiB, as
    LevelDB's, after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    numbers, ids = {}, []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        content, at, part, record = path.read_bytes(), 7, b"", Record()
        while at + 7 <= len(content):
            if (left := 2**15 - at % 2**15) < 7:
                at += left
                continue
            size, kind = struct.unpack_from("<HB", content, at + 4)
            part, at = part + content[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # whole, or its last part
                record.ParseFromString(part)
                part = b""
                items = {
                    (item.nested_key or [item.key])[0]: item.value_json
                    for item in record.history.item
                }
                numbers |= {
                    (name, record.history.step.num): json.loads(value)
                    for name, value in items.items()
                }
                ids += (
                    [record.run.run_id]
                    if record.WhichOneof("record_type") == "run"
                    else []
                )
    assert len(set(ids)) == 1
    return {
        (name, step): value
        for (name, step), value in numbers.items()
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    "name, drawn",
    [("tensorboard", drawn_on_tensorboard), ("wandb", drawn_on_wandb)],
    ids=["tensorboard", "wandb"],
)
def test_a_logger_gets_all_numbers_of_a_run_and_of_its_next_start(
    tmp_path, monkeypatch, name, drawn
):
    library = pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    failed, first, second = [], row_of(1, loss=2.5), row_of(2, loss=None)
    for attempt, rows in ((1, (first, evaluation_of(1))), (2, (second,))):
        writer = RunWriter(tmp_path, active=True, again=True)
        header = header_of(
            resumed_step=attempt - 1, started_utc=f"2026-01-0{attempt}T00:00:00Z"
        )
        writer.start(
            header,
            boards=boards.open_boards(
                [name, name], tmp_path, header, attempt, failed.append
            ),
        )
        for row in rows:
            writer.append(row)
        writer.close()
        leave(writer)
    if name == "wandb":
        library.teardown()  # ends its child process
    assert failed == []
    rows = (("train", first), ("validation", evaluation_of(1)), ("train", second))
    figures = {
        (f"{group}/{figure}", row.step): value
        for group, row in rows
        for figure, value in row.model_dump(exclude={"step"}, exclude_none=True).items()
    }
    assert drawn(tmp_path) == pytest.approx(figures)


@pytest.mark.parametrize(
    "how", ["no API key", pytest.param("no server", marks=pytest.mark.slow)]
)
def test_wandb_without_a_key_or_a_server_writes_files(tmp_path, how):
    pytest.importorskip("wandb")
    key = (
        "WANDB_BASE_URL=http://127.0.0.1:9 WANDB_INIT_TIMEOUT=1"
        f" WANDB_API_KEY={'a' * 40}"
    )
    code = (
        "import pathlib, sys; from trainer.record.boards import open_boards; from"
        " testbed.examples.checkpoints import header_of; told = []; (board,) ="
        " open_boards(['wandb'], pathlib.Path(sys.argv[1]), header_of(), 1,"
        " told.append); board.add(1, {'train/loss': 2.5}); board.close();"
        " print([one.message for one in told])"
    )
    settings = [f"HOME={tmp_path}", *(key.split() if how == "no server" else ())]
    command = [
        "env",
        "-u",
        "WANDB_MODE",
        "-u",
        "WANDB_API_KEY",
        *settings,
        sys.executable,
        "-c",
        code,
        str(tmp_path),
    ]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert ("cannot log to wandb online" in ended.stdout) == (how == "no server")
    assert drawn_on_wandb(tmp_path) == {("train/loss", 1): 2.5}


def test_a_board_that_fails_is_told_once_and_the_record_has_the_numbers(
    tmp_path, monkeypatch
):
    class Full:
        name = "wandb"

        def add(self, *_):
            raise OSError(errno.ENOSPC, "No space left on device")

        close = add

    writer = RunWriter(tmp_path, active=True)
    writer.start(header_of(), boards=[Full()])
    writer.append(row_of(1))
    writer.append(row_of(2))
    run = read_run(tmp_path)
    assert len(run.steps) == 2
    assert [(event.kind, event.step) for event in run.events] == [("board_failed", 1)]
    assert "No space left on device; training continues" in run.events[0].message
    writer.start(header_of(), boards=[Full()])
    writer.close()
    told = []
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert boards.open_boards(["wandb"], tmp_path, header_of(), 1, told.append) == []
    assert [event.kind for event in told] == ["board_failed"]


def test_a_logger_that_is_not_installed_or_unknown_is_refused(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [""])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(
        BadConfig, match="requires wandb, which is not installed"
    ) as refused:
        boards.check_installed(["wandb"])
    assert "pip install '.[wandb]'" in refused.value.next_step
    boards.check_installed(None)
    model = {"name": "m", "config": {"model_type": "bert"}}
    for named, meant in ((["wandbb"], "'wandb'"), ("wandb", "['wandb']")):
        with pytest.raises(BadConfig, match="log_to") as refused:
            parse_table(TrainConfig, {"model": model, "log_to": named}, where="p.toml")
        assert refused.value.next_step == f"Did you mean {meant}?"


def test_loggers_that_are_not_used_are_not_imported(tmp_path):
    code = (
        "import pathlib, sys; import trainer.__main__, trainer.loop; from"
        " trainer.record.boards import open_boards; assert open_boards([],"
        " pathlib.Path(sys.argv[1]), None, 1, print) == []; assert not {'tensorboard',"
        " 'torch.utils.tensorboard', 'wandb'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
