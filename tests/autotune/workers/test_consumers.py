"""Consumers of batches: the replayed step keeps time, the trainer's step trains."""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from autotune.workers.jobs.consumers import ReplayedStep, TrainingStep
from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset
from trainer.distributed.ranks import Ranks

STEP_S = 0.12
"""Time of a replayed step: long next to the time slices of a busy machine."""
STEPS = 6
"""Timed steps."""
LOADS_FAST_S = 0.5 * STEP_S
LOADS_SLOWLY_S = 2.5 * STEP_S
"""Time of a loader for a batch."""


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of torch's threads, which a replayed step sets to 1."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, eq=False)
class FullBatch:
    """Batch that takes the whole time of a replayed step."""

    share: float = 1.0
    """Share of the step's time that the batch takes."""


ALONE = Ranks(
    rank=0, local_rank=0, local_world_size=1, world_size=1, device=torch.device("cpu")
)


def replayed(step_s: float) -> ReplayedStep:
    return ReplayedStep(
        step_s, share=lambda batch: batch.share, micro_batches=1, ranks=ALONE
    )


def load_batches(delay_s: float) -> Iterator[FullBatch]:
    """Yield batches, each of which takes a time to load."""
    while True:
        time.sleep(delay_s)
        yield FullBatch()


def seconds_per_step(consumer: ReplayedStep, loader) -> float:
    """Return the mean time of steps after a first one, which is not timed."""
    consumer.step(loader)
    consumer.finish()
    consumer.wait.take_waited_s()
    started_s = time.perf_counter()
    for _ in range(STEPS):
        consumer.step(loader)
    consumer.finish()
    return (time.perf_counter() - started_s) / STEPS


def test_replayed_step_takes_its_time():
    consumer = replayed(STEP_S)
    cached = itertools.repeat(FullBatch())
    # On a busy machine a step takes longer, but not by a quarter on average.
    assert seconds_per_step(consumer, cached) == pytest.approx(STEP_S, rel=0.25)
    assert consumer.wait.take_waited_s() < STEP_S


def test_replayed_step_lets_threads_run():
    ticks = []
    stop = threading.Event()

    def tick():
        # Every few milliseconds, as if a loader's thread does some work.
        while not stop.wait(0.005):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    seconds_per_step(replayed(STEP_S), itertools.repeat(FullBatch()))
    stop.set()
    ticking.join()
    # There is time for more than 100, but the machine may be busy. A step that holds
    # the GIL would leave none.
    assert len(ticks) >= 5


def test_fast_loader_hides_behind_the_step():
    consumer = replayed(STEP_S)
    step_s = seconds_per_step(consumer, load_batches(LOADS_FAST_S))
    # One after the other, loading and step would take 1.5 times as long as a step.
    assert 0.75 * STEP_S < step_s < 1.35 * STEP_S
    # The first batch is waited for before there is a step to hide behind.
    assert consumer.wait.take_waited_s() < 2 * STEP_S


def test_slow_loader_sets_the_pace():
    consumer = replayed(STEP_S)
    step_s = seconds_per_step(consumer, load_batches(LOADS_SLOWLY_S))
    # Near 2.5 times as long as a step; one after the other, they would take 3.5 times.
    assert 1.75 * STEP_S < step_s < 3.25 * STEP_S
    # The device waits for 1.5 times as long as it computes.
    assert consumer.wait.take_waited_s() >= STEPS * STEP_S


def test_replayed_step_returns_its_batches():
    first, second = FullBatch(), FullBatch()
    loader = iter([first, second])
    consumer = replayed(0.001)
    assert consumer.step(loader) == [first]
    assert consumer.step(loader) == [second]


@pytest.fixture
def training_step(patterned_dataset):
    """Return a training step, its model and its micro-batches."""
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(micro_batch_size=4)
    training = training_of(config, dataset)
    consumer = TrainingStep(
        training, config, micro_batches=1, device=torch.device("cpu")
    )
    batches = iter(micro_batches(dataset, config, steps=4))
    return consumer, training.module.model, batches


def test_training_step_changes_the_model(training_step):
    consumer, model, batches = training_step
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        consumer.step(batches)
    consumer.finish()
    after = model.parameters()
    assert any(
        not torch.equal(old, new) for old, new in zip(before, after, strict=True)
    )


def test_training_step_returns_its_micro_batches(training_step):
    consumer, _, batches = training_step
    for _ in range(3):
        (batch,) = consumer.step(batches)
        assert batch.non_padding_tokens > 0


def test_training_step_times_the_wait_for_data(training_step):
    consumer, _, batches = training_step
    consumer.step(batches)
    consumer.finish()
    assert consumer.wait.take_waited_s() > 0


def test_training_step_rejects_a_loss_of_nan(training_step):
    consumer, model, batches = training_step
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    consumer.step(batches)
    with pytest.raises(ValueError, match="the loss is nan"):
        consumer.finish()
