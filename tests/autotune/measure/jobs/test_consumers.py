import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from autotune.measure.jobs.feed import ReplayedStep, TrainingStep
from tests.trainer.oracles import config_of, micro_batches, training_of
from trainer.dataset import TokenDataset
from trainer.parallel import Ranks

STEP_S, ROW_TOKENS = 0.12, 8


@pytest.fixture(autouse=True)
def threads():
    """A replayed step takes torch's threads away."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def full_batch() -> SimpleNamespace:
    """As much as a replayed step looks at: a row as wide as it can be."""
    return SimpleNamespace(ids_BS=torch.zeros(1, ROW_TOKENS))


def replayed(step_s: float) -> ReplayedStep:
    alone = Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1, device=torch.device("cpu"))
    return ReplayedStep(step_s, ROW_TOKENS, 1, alone)


def delayed(delay_s: float):
    while True:
        time.sleep(delay_s)
        yield full_batch()


def seconds_per_step(consumer: ReplayedStep, loader, steps: int = 6) -> float:
    consumer.step(loader)
    consumer.finish()
    consumer.wait.read()
    started_s = time.perf_counter()
    for _ in range(steps):
        consumer.step(loader)
    consumer.finish()
    return (time.perf_counter() - started_s) / steps


def test_a_replayed_step_takes_its_time_lets_threads_run_and_waits_for_no_fast_loader():
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    consumer = replayed(STEP_S)
    assert seconds_per_step(consumer, itertools.repeat(full_batch())) == pytest.approx(STEP_S, rel=0.25)
    assert consumer.wait.read() < STEP_S
    stop.set()
    ticking.join()
    assert len(ticks) >= 5


@pytest.mark.parametrize(("delay", "fastest", "slowest"), [(0.5, 0.75, 1.35), (2.5, 1.75, 3.25)])
def test_a_faster_loader_hides_behind_the_step_and_a_slower_one_sets_the_pace(delay, fastest, slowest):
    consumer = replayed(STEP_S)
    assert fastest * STEP_S < seconds_per_step(consumer, delayed(delay * STEP_S)) < slowest * STEP_S
    # The first batch is waited for before there is a step to hide behind.
    assert consumer.wait.read() < 2 * STEP_S if delay < 1 else consumer.wait.read() >= 6 * STEP_S


def test_a_replayed_step_hands_on_what_the_loader_gave():
    batches = [full_batch(), full_batch()]
    loader, consumer = iter(batches), replayed(0.001)
    assert [consumer.step(loader), consumer.step(loader)] == [[batch] for batch in batches]


@pytest.fixture
def training(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(micro_batch_rows=4)
    return training_of(config, dataset), config, iter(micro_batches(dataset, config, steps=4))


def test_a_training_step_really_trains(training):
    built, config, batches = training
    before = [parameter.detach().clone() for parameter in built.model.parameters()]
    consumer = TrainingStep(built, config, 1, torch.device("cpu"))
    for _ in range(3):
        (batch,) = consumer.step(batches)
        assert batch.real_tokens > 0
    consumer.finish()
    assert any(not torch.equal(old, new) for old, new in zip(before, built.model.parameters(), strict=True))
    assert consumer.wait.read() > 0


def test_a_loss_that_is_no_number_is_refused(training):
    built, config, batches = training
    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.fill_(float("nan"))
    consumer = TrainingStep(built, config, 1, torch.device("cpu"))
    consumer.step(batches)
    with pytest.raises(ValueError, match="the loss is nan"):
        consumer.finish()
