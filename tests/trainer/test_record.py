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
from tests.trainer.oracles import config_of
from trainer.batch import make_plan
from trainer.build import build_training
from trainer.checkpoint import read_checkpoint
from trainer.config import DataSettings
from trainer.errors import BadConfig
from trainer.events import EventRow, happened, utc_now
from trainer.journal import describe_run, driver_of, open_dataset
from trainer.parallel import join_ranks
from trainer.record import StartClock
from trainer.resume import Start


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
    steps = (("import", 0), ("staging", 2), ("build", 1), ("first_batch", 1), ("build", 2), ("first_step", 4))
    for phase, seconds in steps:
        now[0] += seconds
        clock.ended(phase)
    now[0] += 50
    startup = clock.startup()
    assert {name: value for name, value in startup.model_dump().items() if value} == {
        "import_s": 10, "staging_s": 2, "build_s": 3, "first_batch_s": 1, "first_step_s": 4, "total_s": 20,
    }  # fmt: skip
    assert clock.total_s() == 70


def test_the_beginning_is_known_by_the_other_clock_too():
    clock = StartClock(began_s=time.time() - 100)
    assert time.monotonic() - clock.monotonic_start_s == pytest.approx(100, abs=1)


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
    resolved, ranks = resolved_of(config, data), join_ranks(config, environment={})
    dataset = open_dataset(resolved)
    training = build_training(config, dataset.manifest.vocab_size, dataset.manifest.special_ids, ranks)
    path = write_checkpoint(tmp_path / "checkpoints", 7)
    start = Start(checkpoint=path, manifest=read_checkpoint(path))
    plan = make_plan(config, len(dataset), 1)
    header = describe_run(resolved, dataset, plan, training, hosts=["here"], ranks=ranks, start=start)
    assert (header.resumed_step, header.job) == (7, "slurm-17")
    assert header.resumed_from == start.origin
    assert "step-000000007" in (header.resumed_from or "")
    assert (header.config_sha256, header.dataset_hash) == (resolved.config_sha256, dataset.manifest.dataset_hash)
    assert (header.global_batch_rows, header.accumulation_steps) == (plan.global_batch_rows, plan.accumulation_steps)
    assert header.parameters == sum(one.numel() for one in training.module.parameters())
    assert any("0.25" in change for change in header.recipe_changes)
    assert (header.versions["torch"], header.versions["python"]) == (torch.__version__, platform.python_version())
    assert header.hosts == ["here"]
    assert header.peak_flops_per_s is None  # of a CPU nobody knows it
    fresh = describe_run(resolved, dataset, plan, training, hosts=["here"], ranks=ranks, start=Start())
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
