import errno
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainer
from testbed.datasets import write_dataset
from testbed.examples.checkpoints import (
    end_of,
    header_of,
    leave,
    resolved_of,
    write_checkpoint,
)
from testbed.examples.run_rows import evaluation_of, event_of, row_of, startup_of
from tests.trainer.oracles import config_of, training_of
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.resume import Start
from trainer.config.train_config import DataSettings
from trainer.data.global_batch import make_plan
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig
from trainer.preflight import describe_run, gpu_driver_version, open_dataset
from trainer.record import run_record
from trainer.record import writer as run_writer
from trainer.record.boards import open_boards
from trainer.record.writer import RunWriter


@pytest.fixture
def begin(tmp_path):
    """Starts of one run, each when the one before it is gone."""
    writers = []

    def start(**changes) -> RunWriter:
        if writers:
            leave(writers[-1])
        writers.append(RunWriter(tmp_path / "r", active=True, again=True))
        writers[-1].start(header_of(**changes))
        return writers[-1]

    return start


ROWS = [row_of(1), row_of(2, loss=None), evaluation_of(2), event_of(2)]


@pytest.mark.parametrize("active", [True, False], ids=["the first rank", "another"])
def test_a_run_is_read_back_as_it_was_written_and_shown_and_other_ranks_write_only_its_end(
    tmp_path, active
):
    directory, shown = tmp_path / "r", []
    writer = RunWriter(directory, active=active)
    writer.start(
        header_of(),
        shown.append,
        open_boards(None, directory, header_of(), 1, pytest.fail) if active else (),
    )
    writer.started(startup_of())
    for row in ROWS:
        writer.append(row)
    writer.close()
    assert shown == ([header_of(), *ROWS] if active else [])
    assert directory.exists() == active
    directory.mkdir(exist_ok=True)
    writer.finish(end_of(75, checkpoint="step-000000002"))
    assert run_record.read_exit(directory) == end_of(75, checkpoint="step-000000002")
    if active:
        run = run_record.read_run(directory)
        assert (run.header, run.steps) == (
            header_of(),
            (row_of(1), row_of(2, loss=None)),
        )
        assert (run.evaluations, run.events, run.startup) == (
            (evaluation_of(2),),
            (event_of(2),),
            startup_of(),
        )
        assert run.end == run_record.read_exit(directory)
        assert list((directory / run_record.TENSORBOARD_DIRECTORY).iterdir())


def test_a_later_start_hides_what_tensorboard_drew(tmp_path, monkeypatch):
    import torch.utils.tensorboard

    monkeypatch.setattr(
        torch.utils.tensorboard,
        "SummaryWriter",
        lambda **options: options["purge_step"],
    )
    opened = [
        open_boards(None, tmp_path, header_of(resumed_step=5), attempt, pytest.fail)[0]
        for attempt in (1, 2)
    ]
    assert [board._writer for board in opened] == [None, 6]


def test_a_start_that_goes_on_cuts_torn_tails_and_replaces_rows_of_steps_that_are_taken_again(
    begin, tmp_path
):
    first = begin()
    for step in (1, 2, 3, 4):
        for row in (
            row_of(step, loss=1.0),
            evaluation_of(step, loss=1.0),
            event_of(step),
        ):
            first.append(row)
    for name in ("steps", "evaluations", "events"):
        with (tmp_path / "r" / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 5, "ä')
    assert [row.step for row in run_record.read_run(tmp_path / "r").steps] == [
        1,
        2,
        3,
        4,
    ]
    second = begin()
    for row in (row_of(3, loss=2.0), evaluation_of(2, loss=2.0), event_of(3)):
        second.append(row)
    run = run_record.read_run(tmp_path / "r")
    assert [(row.step, row.loss) for row in run.steps] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert [(row.step, row.loss) for row in run.evaluations] == [(1, 1.0), (2, 2.0)]
    assert [row.step for row in run.events] == [1, 2, 3, 4, 3]


def test_every_start_puts_what_the_one_before_wrote_aside(begin, tmp_path):
    first = begin()
    first.started(startup_of())
    first.finish(end_of(75))
    again = {"resumed_from": "step-000000002", "resumed_step": 2, "job": "slurm-1"}
    second = begin(**again)
    run = run_record.read_run(tmp_path / "r")
    assert (run.header, run.startup, run.end) == (
        header_of(attempt=2, **again),
        None,
        None,
    )
    assert [first.attempt, second.attempt, begin().attempt] == [1, 2, 3]
    earlier = tmp_path / "r" / run_record.EARLIER_DIRECTORY
    assert {path.name for path in earlier.iterdir()} == {"1", "2"}
    assert {path.name for path in (earlier / "1").iterdir()} == {
        "exit.json",
        "run.json",
        "startup.json",
    }
    assert run_record.read_run(earlier / "1").end == end_of(75)
    assert run_record.read_run(earlier / "2").header.attempt == 2


def test_a_start_that_dies_before_its_header_leaves_a_run_that_is_written_into_only_to_go_on(
    begin, tmp_path
):
    leave(begin())
    with pytest.raises(BadConfig, match="already contains a run"):
        RunWriter(tmp_path / "r", active=True)
    leave(RunWriter(tmp_path / "r", active=True, again=True))
    assert run_record.read_run(tmp_path / "r").header.attempt == 1
    assert RunWriter(tmp_path / "r", active=True, again=True).attempt == 3


def test_a_first_start_that_ends_before_its_header_is_put_aside_too_and_hides_no_origin(
    tmp_path,
):
    for attempt, origin in ((1, None), (2, "/other/checkpoint"), (3, "step-000000002")):
        writer = RunWriter(tmp_path / "r", active=True, again=True)
        assert (writer.attempt, run_record.read_exit(tmp_path / "r")) == (attempt, None)
        if origin:
            writer.start(header_of(resumed_from=origin))
        writer.finish(end_of(75))
        leave(writer)
    earlier = tmp_path / "r" / run_record.EARLIER_DIRECTORY
    assert [
        {path.name for path in (earlier / start).iterdir()} for start in ("1", "2")
    ] == [{"exit.json"}, {"exit.json", "run.json"}]
    assert (
        run_record.read_first_header(tmp_path / "r").resumed_from == "/other/checkpoint"
    )


def test_rows_that_cannot_be_written_wait_which_is_said_once_and_follow_whole_and_in_order(
    tmp_path, monkeypatch
):
    shown, write = [], os.write
    writer = RunWriter(tmp_path / "r", active=True)
    writer.start(header_of(), shown.append)
    writer.append(row_of(1))

    def fills_up(fd, content):
        if len(content) > 20:
            return write(fd, content[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    for step in (2, 4):  # and again when it happens again
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fills_up)
            writer.append(row_of(step))
            writer.append(event_of(step))
            assert writer.write_error == "No space left on device"
            assert run_record.read_run(tmp_path / "r").steps[-1] == row_of(step - 1)
            assert (tmp_path / "r" / "steps.jsonl").read_bytes().endswith(b"}\n")
        writer.append(row_of(step + 1))
        assert writer.write_error is None
    run = run_record.read_run(tmp_path / "r")
    assert (run.steps, run.events) == (
        tuple(map(row_of, range(1, 6))),
        (event_of(2), event_of(4)),
    )
    told = [row for row in shown if getattr(row, "kind", "") == "record_waits"]
    assert [row.step for row in told] == [2, 4]
    assert "No space left on device" in told[0].message


@pytest.mark.parametrize("version", [2, 9])
def test_what_is_no_run_or_another_version_is_refused(begin, tmp_path, version):
    with pytest.raises(BadConfig, match="not a run"):
        run_record.read_run(tmp_path)
    begin()
    path = tmp_path / "r" / "run.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"schema_version": version})
    )
    with pytest.raises(BadConfig):
        run_record.read_run(tmp_path / "r")


def test_a_second_start_is_refused_while_one_is_at_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_writer, "_LOCK_TIMEOUT_S", 0.2)
    holder = RunWriter(tmp_path / "r", active=True)
    with pytest.raises(BadConfig, match="another process is using"):
        RunWriter(tmp_path / "r", active=True, again=True)
    leave(holder)
    assert RunWriter(tmp_path / "r", active=True, again=True).attempt == 1


def test_every_second_until_the_first_step_belongs_to_one_phase(monkeypatch):
    moment = [1000.0]
    monkeypatch.setattr(time, "time", lambda: moment[0])
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    clock = run_record.StartClock(began_s=990.0)
    steps = (
        ("import", 0),
        ("staging", 2),
        ("build", 1),
        ("first_batch", 1),
        ("build", 2),
        ("first_step", 4),
    )
    for phase, seconds in steps:
        moment[0] += seconds
        clock.ended(phase)
    moment[0] += 50
    assert {
        name: value for name, value in clock.startup().model_dump().items() if value
    } == {
        "import_s": 10,
        "staging_s": 2,
        "build_s": 3,
        "first_batch_s": 1,
        "first_step_s": 4,
        "total_s": 20,
    }
    assert (clock.total_s(), clock.monotonic_start_s) == (70, 490)


@pytest.fixture
def data(tmp_path):
    return write_dataset(
        tmp_path / "data", [[5 + step % 60 for step in range(20)]] * 40, vocab_size=128
    )


def test_a_dataset_is_held_against_the_profile_and_has_samples(tmp_path, data):
    found = open_dataset(resolved_of(config_of(), data)).manifest.dataset_hash
    assert (
        len(
            open_dataset(
                resolved_of(config_of(data=DataSettings(dataset_hash=found)), data)
            )
        )
        == 40
    )
    other = config_of(data=DataSettings(dataset_hash="0" * len(found)))
    with pytest.raises(
        BadConfig, match=f"its hash is {found[:12]}…, not 000000000000"
    ) as refused:
        open_dataset(resolved_of(other, data))
    assert "--data" in refused.value.next_step
    empty = write_dataset(tmp_path / "empty", [], vocab_size=128)
    with pytest.raises(BadConfig, match="is empty"):
        open_dataset(resolved_of(config_of(), empty))


def test_the_header_says_what_is_trained_with_what_and_from_where_it_goes_on(
    tmp_path, data, monkeypatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    config = config_of(attention_dropout=0.25)
    resolved = resolved_of(config, data)
    dataset = open_dataset(resolved)
    training, plan = training_of(config, dataset), make_plan(config, len(dataset), 1)
    path = write_checkpoint(tmp_path / "checkpoints", 7)
    start = Start(checkpoint=path, manifest=read_checkpoint(path))
    others = {"hosts": ["here"], "ranks": join_ranks(config, environment={})}
    header = describe_run(resolved, dataset, plan, training, start=start, **others)
    assert (header.resumed_step, header.resumed_from, header.job) == (
        7,
        "step-000000007",
        "slurm-17",
    )
    assert (header.config_sha256, header.dataset_hash) == (
        resolved.config_sha256,
        dataset.manifest.dataset_hash,
    )
    assert (header.global_batch_size, header.gradient_accumulation_steps) == (
        plan.global_batch_size,
        plan.gradient_accumulation_steps,
    )
    assert header.parameters == sum(one.numel() for one in training.module.parameters())
    assert any("0.25" in change for change in header.recipe_changes)
    assert (header.versions["torch"], header.versions["python"]) == (
        torch.__version__,
        platform.python_version(),
    )
    # Of a CPU nobody knows it.
    assert (header.hosts, header.peak_flops_per_s) == (["here"], None)
    fresh = describe_run(resolved, dataset, plan, training, start=Start(), **others)
    assert (fresh.resumed_from, fresh.resumed_step) == (None, 0)


@pytest.mark.parametrize("version", ["580.95.05", "0.0 (nullgpu)", None])
def test_the_driver_of_a_gpu_is_as_nvml_says_it(monkeypatch, version):
    def answer():
        if version is None:
            raise LookupError
        return version

    nvml = SimpleNamespace(
        NVMLError=LookupError, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=answer
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert (
        gpu_driver_version(SimpleNamespace(device=torch.device("cuda", 0))) == version
    )
    assert gpu_driver_version(SimpleNamespace(device=torch.device("cpu"))) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_driver_version(SimpleNamespace(device=torch.device("cuda", 0))) is None


def test_the_code_of_a_run_is_all_of_the_trainers(tmp_path):
    package = tmp_path / "trainer"
    shutil.copytree(Path(trainer.__file__).parent, package)
    assert run_record.code_sha256(package) == run_record.code_sha256()
    (package / "loop.py").write_text("")
    assert run_record.code_sha256(package) != run_record.code_sha256()
