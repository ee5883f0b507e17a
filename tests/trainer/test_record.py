import datetime
import errno
import importlib.util
import math
import platform
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import write_dataset
from tests.trainer.checkpoints import header_of, resolved_of, write_checkpoint
from tests.trainer.oracles import config_of
from tests.trainer.rows import evaluation_of, event_of, row_of
from trainer.batch import make_plan
from trainer.build import build_training
from trainer.checkpoint import read_checkpoint
from trainer.config import DataSettings
from trainer.errors import BadConfig
from trainer.events import EventRow, happened, utc_now
from trainer.journal import Journal, describe_run, driver_of, open_dataset, peak_of
from trainer.meter import DeviceFacts
from trainer.parallel import join_ranks
from trainer.record import TENSORBOARD_DIRECTORY, StartClock, read_run
from trainer.resume import Start
from trainer.writer import RunWriter


def test_an_event_of_numbers_that_are_none_is_json_that_is_read_back():
    event = happened(
        3, "spike", "high", level="warning", values={"loss": math.nan, "norm": -math.inf, "n": 1, "s": "x"}
    )
    assert event.values == {"loss": "nan", "norm": "-inf", "n": 1, "s": "x"}
    assert EventRow.model_validate_json(event.model_dump_json()) == event


def test_an_event_is_of_this_moment_and_asks_for_nothing_by_itself():
    event = happened(3, "saved", "saved step-000000003")
    assert (event.level, event.action, event.next_step, event.causes, event.samples) == ("info", "none", "", [], [])
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(utc_now())
    assert abs(age.total_seconds()) < 5
    assert utc_now().endswith("Z")


@pytest.fixture
def now(monkeypatch):
    """A clock that stands until it is moved."""
    moment = [1000.0]
    monkeypatch.setattr(time, "time", lambda: moment[0])
    return moment


def test_every_second_until_the_first_step_belongs_to_one_phase(now):
    clock = StartClock(began_s=990.0)
    for phase, seconds in (("import", 0), ("staging", 2), ("build", 3), ("first_batch", 1), ("first_step", 4)):
        now[0] += seconds
        clock.ended(phase)
    now[0] += 50
    startup = clock.startup()
    assert (startup.import_s, startup.staging_s, startup.build_s) == (10, 2, 3)
    assert (startup.first_batch_s, startup.first_step_s) == (1, 4)
    assert (startup.process_group_s, startup.restore_s, startup.compile_s) == (0, 0, 0)
    assert startup.total_s == 20
    assert clock.total_s() == 70
    assert sum(startup.model_dump(exclude={"total_s"}).values()) == pytest.approx(startup.total_s)


def test_a_phase_that_comes_twice_is_added_up(now):
    clock = StartClock()
    for _ in range(2):
        now[0] += 1
        clock.ended("build")
    assert clock.startup().build_s == 2


def test_the_beginning_is_known_by_the_other_clock_too():
    clock = StartClock(began_s=time.time() - 100)
    assert time.monotonic() - clock.monotonic_start_s == pytest.approx(100, abs=1)


ROWS = [row_of(1), row_of(2, loss=None), evaluation_of(2), event_of(2)]


def _written(directory, *, active: bool) -> list:
    """What is shown of a run."""
    shown = []
    journal = Journal(RunWriter(directory, active=active), shown.append, header_of(), active=active)
    for row in ROWS:
        journal.write(row)
    journal.close()
    return shown


def test_rows_reach_the_record_the_screen_and_tensorboard(tmp_path):
    assert _written(tmp_path / "r", active=True) == [header_of(), *ROWS]
    run = read_run(tmp_path / "r")
    assert (run.steps, run.evaluations) == ((row_of(1), row_of(2, loss=None)), (evaluation_of(2),))
    assert run.events == (event_of(2),)
    assert importlib.util.find_spec("tensorboard")
    assert list((tmp_path / "r" / TENSORBOARD_DIRECTORY).iterdir())


def test_other_ranks_write_and_show_nothing(tmp_path):
    assert _written(tmp_path / "r", active=False) == []
    assert not (tmp_path / "r").exists()


def test_a_later_start_hides_what_tensorboard_drew_of_steps_that_are_taken_again(tmp_path, monkeypatch):
    import torch.utils.tensorboard

    asked = []
    monkeypatch.setattr(torch.utils.tensorboard, "SummaryWriter", lambda **options: asked.append(options))
    for attempt, step in ((1, 0), (2, 5)):
        header = header_of(attempt=attempt, resumed_step=step)
        Journal(RunWriter(tmp_path / str(attempt), active=True), [].append, header, active=True)
    assert [options["purge_step"] for options in asked] == [None, 6]


def test_a_record_that_cannot_be_written_is_said_once_and_again_when_it_happens_again(tmp_path, monkeypatch):
    writer, shown = RunWriter(tmp_path / "r", active=True), []
    journal = Journal(writer, shown.append, header_of(), active=True)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for begin in (1, 11):
        with monkeypatch.context() as patch:
            patch.setattr("trainer.writer.append_whole", full)
            for step in range(begin, begin + 3):
                journal.write(row_of(step))
        journal.write(row_of(begin + 3))
    told = [row for row in shown if isinstance(row, EventRow)]
    assert [(row.kind, row.step) for row in told] == [("record_waits", 1), ("record_waits", 11)]
    assert "No space left on device" in told[0].message
    assert len(read_run(tmp_path / "r").steps) == 8


@pytest.fixture
def data(tmp_path):
    return write_dataset(tmp_path / "data", [[5 + step % 60 for step in range(20)]] * 40, vocab_size=128)


def test_a_dataset_is_held_against_the_profile(data):
    found = open_dataset(resolved_of(config_of(), data)).manifest.dataset_hash
    right = config_of(data=DataSettings(dataset_hash=found))
    assert len(open_dataset(resolved_of(right, data))) == 40
    other = config_of(data=DataSettings(dataset_hash="0" * len(found)))
    with pytest.raises(BadConfig, match=f"its hash begins {found[:12]}, not 000000000000") as refused:
        open_dataset(resolved_of(other, data))
    assert "--data" in refused.value.next_step


def test_a_dataset_without_samples_is_refused(tmp_path):
    empty = write_dataset(tmp_path / "empty", [], vocab_size=128)
    with pytest.raises(BadConfig, match="holds no samples"):
        open_dataset(resolved_of(config_of(), empty))


def test_the_header_says_what_is_trained_with_what_and_from_where_it_goes_on(tmp_path, data):
    config = config_of(attention_dropout=0.25)
    resolved, ranks = resolved_of(config, data), join_ranks(config, environment={})
    dataset = open_dataset(resolved)
    training = build_training(config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks)
    facts = DeviceFacts(work=training.work, peak_flops_per_s=peak_of(config, ranks), hosts=("here",))
    path = write_checkpoint(tmp_path / "checkpoints", 7)
    start = Start(checkpoint=path, manifest=read_checkpoint(path), job="slurm 17")
    plan = make_plan(config, len(dataset), 1)
    header = describe_run(resolved, dataset, plan, training, facts=facts, ranks=ranks, start=start, attempt=3)
    assert (header.attempt, header.resumed_step, header.job) == (3, 7, "slurm 17")
    assert header.resumed_from == start.origin
    assert "step-000000007" in (header.resumed_from or "")
    assert (header.config_sha256, header.dataset_hash) == (resolved.config_sha256, dataset.manifest.dataset_hash)
    assert (header.global_batch_rows, header.accumulation_steps) == (plan.global_batch_rows, plan.accumulation_steps)
    assert header.parameters == sum(one.numel() for one in training.module.parameters())
    assert any("0.25" in change for change in header.recipe_changes)
    assert (header.versions["torch"], header.versions["python"]) == (torch.__version__, platform.python_version())
    assert header.hosts == ["here"]
    assert header.peak_flops_per_s is None  # of a CPU nobody knows it
    fresh = describe_run(resolved, dataset, plan, training, facts=facts, ranks=ranks, start=Start(), attempt=1)
    assert (fresh.resumed_from, fresh.resumed_step) == (None, 0)


class Refusal(Exception):
    pass


def nvml(version):
    def answer():
        if version is None:
            raise Refusal
        return version

    return SimpleNamespace(NVMLError=Refusal, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=answer)


@pytest.mark.parametrize("version", ["580.95.05", "0.0 (nullgpu)", None])
def test_the_driver_of_a_gpu_is_as_nvml_says_it(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(version))
    assert driver_of(SimpleNamespace(device=torch.device("cuda", 0))) == version
    assert driver_of(SimpleNamespace(device=torch.device("cpu"))) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_of(SimpleNamespace(device=torch.device("cuda", 0))) is None
