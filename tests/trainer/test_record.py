import datetime
import math
import platform
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import write_dataset
from tests.trainer.checkpoints import resolved_of, write_checkpoint
from tests.trainer.oracles import config_of, training_of
from trainer.batch import make_plan
from trainer.checkpoint import read_checkpoint
from trainer.config import DataSettings
from trainer.errors import BadConfig
from trainer.events import EventRow, happened, utc_now
from trainer.journal import describe_run, driver_of, open_dataset
from trainer.parallel import join_ranks
from trainer.record import StartClock
from trainer.resume import Start


def test_an_event_is_of_this_moment_asks_for_nothing_by_itself_and_is_read_back_with_numbers_that_are_none():
    values = {"loss": math.nan, "norm": -math.inf, "n": 1, "s": "x"}
    event = happened(3, "saved", "saved step-000000003", values=values)
    assert (event.level, event.action, event.next_step, event.causes, event.samples) == ("info", "none", "", [], [])
    assert event.values == {"loss": "nan", "norm": "-inf", "n": 1, "s": "x"}
    assert EventRow.model_validate_json(event.model_dump_json()) == event
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(utc_now())
    assert abs(age.total_seconds()) < 5
    assert utc_now().endswith("Z")


@pytest.fixture
def now(monkeypatch):
    """Both clocks, standing until the calendar's is moved."""
    moment = [1000.0]
    monkeypatch.setattr(time, "time", lambda: moment[0])
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    return moment


def test_every_second_until_the_first_step_belongs_to_one_phase(now):
    clock = StartClock(began_s=990.0)
    steps = (("import", 0), ("staging", 2), ("build", 1), ("first_batch", 1), ("build", 2), ("first_step", 4))
    for phase, seconds in steps:
        now[0] += seconds
        clock.ended(phase)
    now[0] += 50
    startup = clock.startup()
    assert {name: value for name, value in startup.model_dump().items() if value} == {
        "import_s": 10, "staging_s": 2, "build_s": 3, "first_batch_s": 1, "first_step_s": 4, "total_s": 20,
    }  # fmt: skip
    assert (clock.total_s(), clock.monotonic_start_s) == (70, 490)


@pytest.fixture
def data(tmp_path):
    return write_dataset(tmp_path / "data", [[5 + step % 60 for step in range(20)]] * 40, vocab_size=128)


def test_a_dataset_is_held_against_the_profile_and_has_samples(tmp_path, data):
    found = open_dataset(resolved_of(config_of(), data)).manifest.dataset_hash
    assert len(open_dataset(resolved_of(config_of(data=DataSettings(dataset_hash=found)), data))) == 40
    other = config_of(data=DataSettings(dataset_hash="0" * len(found)))
    with pytest.raises(BadConfig, match=f"its hash begins {found[:12]}, not 000000000000") as refused:
        open_dataset(resolved_of(other, data))
    assert "--data" in refused.value.next_step
    empty = write_dataset(tmp_path / "empty", [], vocab_size=128)
    with pytest.raises(BadConfig, match="holds no samples"):
        open_dataset(resolved_of(config_of(), empty))


def test_the_header_says_what_is_trained_with_what_and_from_where_it_goes_on(tmp_path, data, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    config = config_of(attention_dropout=0.25)
    resolved = resolved_of(config, data)
    dataset = open_dataset(resolved)
    training, plan = training_of(config, dataset), make_plan(config, len(dataset), 1)
    path = write_checkpoint(tmp_path / "checkpoints", 7)
    start = Start(checkpoint=path, manifest=read_checkpoint(path))
    others = {"hosts": ["here"], "ranks": join_ranks(config, environment={})}
    header = describe_run(resolved, dataset, plan, training, start=start, **others)
    assert (header.resumed_step, header.resumed_from, header.job) == (7, "step-000000007", "slurm-17")
    assert (header.config_sha256, header.dataset_hash) == (resolved.config_sha256, dataset.manifest.dataset_hash)
    assert (header.global_batch_rows, header.accumulation_steps) == (plan.global_batch_rows, plan.accumulation_steps)
    assert header.parameters == sum(one.numel() for one in training.module.parameters())
    assert any("0.25" in change for change in header.recipe_changes)
    assert (header.versions["torch"], header.versions["python"]) == (torch.__version__, platform.python_version())
    assert (header.hosts, header.peak_flops_per_s) == (["here"], None)  # of a CPU nobody knows it
    fresh = describe_run(resolved, dataset, plan, training, start=Start(), **others)
    assert (fresh.resumed_from, fresh.resumed_step) == (None, 0)


@pytest.mark.parametrize("version", ["580.95.05", "0.0 (nullgpu)", None])
def test_the_driver_of_a_gpu_is_as_nvml_says_it(monkeypatch, version):
    def answer():
        if version is None:
            raise LookupError
        return version

    nvml = SimpleNamespace(NVMLError=LookupError, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=answer)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert driver_of(SimpleNamespace(device=torch.device("cuda", 0))) == version
    assert driver_of(SimpleNamespace(device=torch.device("cpu"))) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_of(SimpleNamespace(device=torch.device("cuda", 0))) is None
