"""The loader of a training: its position, its last step and the end of its workers."""

import contextlib
import multiprocessing
import os
import signal
from dataclasses import dataclass
from itertools import islice

import pytest

from tests.trainer.tiny_models import config_of
from trainer.data.batch_plan import make_plan
from trainer.data.dataset import TokenDataset
from trainer.data.loader import MicroBatchLoader
from trainer.data.micro_batch import MicroBatch
from trainer.formats.train_config import DataSettings
from trainer.runtime.ranks import join_ranks

GLOBAL_BATCH_SEQUENCES = 8
"""Sequences of a step of ``loader_of``, in two micro-batches."""


@pytest.fixture
def loader_of(dataset, make_dataset):
    """Return a function that makes loaders, which are closed after the test.

    Its argument is a list of samples, or None for those of ``dataset``.
    """
    with contextlib.ExitStack() as stack:

        def make(samples=None, **changes) -> MicroBatchLoader:
            config = config_of(micro_batch_size=4, **changes)
            source = dataset
            if samples is not None:
                source = TokenDataset.open(make_dataset(samples, vocab_size=128))
            plan = make_plan(config, len(source), world_size=1)
            ranks = join_ranks(config, environment={})
            loader = MicroBatchLoader(source, config, plan, ranks)
            stack.callback(loader.close)
            return loader

        yield make


def content_of(batch: MicroBatch) -> tuple[bytes, ...]:
    """Return all tensors of a micro-batch, in a form that can be compared."""
    return tuple(batch.tensors[name].numpy().tobytes() for name in batch.tensors.places)


@dataclass(frozen=True)
class TakenStep:
    """One step of a loader, in a form that can be compared."""

    contents: list[tuple[bytes, ...]]
    """Content of each micro-batch."""
    samples: list[int]
    """Indices of its samples in the dataset."""


def take_step(loader: MicroBatchLoader) -> TakenStep:
    batches = loader.next_step(lambda loaded, count: list(islice(loaded, count)))
    return TakenStep(
        contents=[content_of(batch) for batch in batches],
        samples=loader.samples.tolist(),
    )


def take_steps(loader: MicroBatchLoader, count: int) -> list[TakenStep]:
    return [take_step(loader) for _ in range(count)]


@pytest.fixture(params=[0, 1, 3], ids="{} workers".format)
def loader(request, loader_of, layout):
    """A loader at the start of the data, in every layout, with and without workers."""
    data = DataSettings(num_workers=request.param, prefetch_factor=3)
    loader = loader_of(layout=layout, data=data)
    loader.start_at(loader.position)
    return loader


def test_position_counts_steps_taken(loader):
    assert loader.job_position() == loader.position
    take_steps(loader, 3)
    position = loader.job_position()
    assert position == loader.position
    assert position.steps == 3
    assert position.rows == 3 * GLOBAL_BATCH_SEQUENCES


def test_loader_restarts_at_a_position(loader):
    before = take_steps(loader, 3)
    position = loader.job_position()
    after = take_steps(loader, 3)
    for step in after:
        assert len(step.contents) == 2
        assert step.samples
    assert before[0] not in after
    loader.start_at(position)  # as after a rollback
    assert take_steps(loader, 3) == after


def test_steps_do_not_depend_on_workers(loader, loader_of, layout):
    take_steps(loader, 3)
    position = loader.job_position()
    steps = take_steps(loader, 3)
    end = loader.position
    loader.close()

    without_workers = loader_of(layout=layout)
    without_workers.start_at(position)
    assert take_steps(without_workers, 3) == steps
    assert without_workers.position == end


def test_waiting_for_the_first_step_takes_nothing(loader):
    position = loader.position
    batches = loader.wait_for_first()
    loader.check_first_step()
    assert loader.position == position
    assert take_step(loader).contents == [content_of(batch) for batch in batches]


@pytest.mark.parametrize(
    ("samples", "batch_size"),
    [
        pytest.param(400, 200, id="one lane"),
        pytest.param(4200, 4, id="more lanes than sequences in a step"),
    ],
)
def test_no_step_follows_the_last_epoch(loader_of, samples, batch_size):
    # Lanes end one by one, so a step of few sequences can be empty long before the
    # data is over.
    bodies = []
    for sample in range(samples):
        length = 4 + sample % 50
        bodies.append([5 + (sample + position) % 60 for position in range(length)])
    loader = loader_of(bodies, max_epochs=1, global_batch_size=batch_size)
    loader.start_at(loader.position)
    taken_samples = []
    step = take_step(loader)
    while step.contents:
        taken_samples += step.samples
        step = take_step(loader)
    assert sorted(taken_samples) == list(range(samples))
    assert step.samples == []


@pytest.fixture
def loader_and_workers(loader_of):
    """A loader that is in use, and its two workers, which the end of the test kills."""
    other_processes = set(multiprocessing.active_children())
    loader = loader_of(data=DataSettings(num_workers=2))
    loader.start_at(loader.position)
    take_steps(loader, 2)
    workers = set(multiprocessing.active_children()) - other_processes
    assert len(workers) == 2
    yield loader, workers
    for worker in workers:
        worker.kill()


def has_ended(worker):
    worker.join(10)
    return not worker.is_alive()


def test_close_lets_workers_exit(loader_and_workers):
    loader, workers = loader_and_workers
    loader.close()
    assert all(has_ended(worker) for worker in workers)
    # torch reports a worker that is killed as a failure.
    assert {worker.exitcode for worker in workers} == {0}


def test_close_kills_stuck_worker(loader_and_workers, monkeypatch):
    loader, workers = loader_and_workers
    # Torch waits so long for each worker. It has no public name for this time.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    stuck_worker = min(workers, key=lambda worker: worker.pid)
    # As in a file system that does not respond.
    os.kill(stuck_worker.pid, signal.SIGSTOP)
    loader.close()
    assert all(has_ended(worker) for worker in workers)
