import multiprocessing
import os
import signal
import tracemalloc
from itertools import islice

import numpy as np
import pytest
import torch

from tests.trainer.oracles import config_of
from trainer.config.train_config import DataSettings, TrainConfig
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import (
    MicroBatchLoader,
    check_no_shared_samples,
    make_loader,
    micro_batch_plans,
)
from trainer.data.masking import IGNORED_LABEL
from trainer.data.micro_batch import MicroBatch
from trainer.data.micro_batch_source import MicroBatchSource
from trainer.distributed.ranks import join_ranks
from trainer.errors import BadConfig

LAYOUTS = ("padded", "dynamic", "bucketed", "packed")


def _config(**changes) -> TrainConfig:
    settings = {
        "layout": "padded",
        "seq_length_tokens": 16,
        "micro_batch_size": 4,
        "global_batch_size": 4,
    }
    return config_of(**settings | changes)


def load(
    dataset: TokenDataset,
    config: TrainConfig,
    count: int,
    *,
    world_size: int = 1,
    rank: int = 0,
    source_class: type[MicroBatchSource] = MicroBatchSource,
) -> list[MicroBatch]:
    """Return the first micro-batches of a rank."""
    plan = make_plan(config, len(dataset), world_size)
    plans = islice(micro_batch_plans(dataset, config, plan, rank), count)
    loader = make_loader(source_class(dataset, config, plan), config, plans)
    return list(islice(loader, count))


def content_of(batch: MicroBatch) -> tuple[bytes, ...]:
    tensors = (
        batch.ids_BS,
        batch.starts_N,
        batch.tokens_N,
        batch.predicted_P,
        batch.targets_P,
    )
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_framed_by_special_tokens(dataset, layout):
    config = _config(layout=layout, seq_length_tokens=32)
    plan = make_plan(config, len(dataset), 1)
    source = MicroBatchSource(dataset, config, plan)
    for micro_batch_plan in islice(micro_batch_plans(dataset, config, plan, 0), 30):
        batch = source.__getitems__(micro_batch_plan)
        ids = batch.wide_ids_BS().flatten().numpy()
        # As they were before they were masked.
        ids[batch.predicted_P] = batch.targets_P
        expected = np.zeros(len(ids), dtype=np.int64)
        samples = micro_batch_plan.segments.samples.tolist()
        for sample, start in zip(samples, batch.starts_N.tolist(), strict=True):
            body = dataset.read(sample, 30)
            expected[start : start + len(body) + 2] = [2, *body, 3]
        assert ids.tolist() == expected.tolist()
        assert batch.non_padding_tokens == (expected != 0).sum()


def test_ids_keep_their_stored_type(dataset):
    for batch in load(dataset, _config(), 30):
        assert batch.ids_BS.dtype == batch.targets_P.dtype == torch.uint16


def test_predicted_tokens_are_counted(dataset):
    for batch in load(dataset, _config(), 30):
        assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)


@pytest.fixture
def varied_dataset(make_dataset):
    lengths = (3, 4, 5, 200, 201, 202)
    return TokenDataset.open(make_dataset([[50] * length for length in lengths]))


def test_dynamic_width_is_the_longest_sample(varied_dataset):
    config = _config(
        layout="dynamic", seq_length_tokens=150, micro_batch_size=2, global_batch_size=6
    )
    for batch in load(varied_dataset, config, 3):
        assert batch.ids_BS.shape == (2, int(batch.tokens_N.max()))
        assert batch.ids_BS.shape[1] <= 150


def test_bucketed_width_is_rounded_up(varied_dataset):
    config = _config(
        layout="bucketed",
        seq_length_tokens=512,
        micro_batch_size=3,
        global_batch_size=6,
    )
    shapes = [batch.ids_BS.shape for batch in load(varied_dataset, config, 2)]
    assert shapes == [(3, 64), (3, 256)]


def test_workers_are_forked_whatever_pythons_default(dataset):
    class NotImportable(MicroBatchSource):
        """A class that no other process could import."""

    start_method = multiprocessing.get_start_method()
    # The default since Python 3.14.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        config = _config(data=DataSettings(num_workers=1))
        batches = load(dataset, config, 2, source_class=NotImportable)
        assert len(batches) == 2
    finally:
        multiprocessing.set_start_method(start_method, force=True)


def test_empty_sequences_have_no_labels(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5]))
    config = _config(global_batch_size=3)
    (batch,) = load(dataset, config, 1, world_size=2, rank=1)
    assert (batch.ids_BS.shape[0], batch.non_padding_tokens) == (2, 7)
    assert (batch.labels_BS()[1] == IGNORED_LABEL).all()
    assert batch.attention_BS().sum(dim=1).tolist() == [7, 1]


def test_micro_batch_may_be_all_empty(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5]))
    config = _config(global_batch_size=1, max_epochs=1)
    first, second = load(dataset, config, 2)
    assert first.non_padding_tokens == 7
    assert (second.non_padding_tokens, second.predicted_tokens) == (0, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_rejects_ids_beyond_the_vocabulary(make_dataset, workers):
    directory = make_dataset([[50] * 5] * 8, vocab_size=128)
    (tokens_file,) = directory.glob("train-tokens-*")
    content = bytearray(tokens_file.read_bytes())
    content[-2:] = (60_000).to_bytes(2, "little")
    tokens_file.write_bytes(content)
    config = _config(data=DataSettings(num_workers=workers))
    with pytest.raises(BadConfig) as raised:
        load(TokenDataset.open(directory), config, 2)
    assert "contains ids that exceed its vocabulary" in raised.value.message
    assert "autotune data verify" in raised.value.next_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_does_not_grow_with_batches_read(dataset, layout):
    config = _config(layout=layout, seq_length_tokens=64)
    plan = make_plan(config, len(dataset), 1)
    loader = make_loader(
        MicroBatchSource(dataset, config, plan),
        config,
        micro_batch_plans(dataset, config, plan, 0),
    )
    tracemalloc.start()
    peaks_bytes = []
    for batches in (600, 2400):
        tracemalloc.reset_peak()
        for _ in range(batches):
            next(loader)
        _, peak_bytes = tracemalloc.get_traced_memory()
        peaks_bytes.append(peak_bytes)
    tracemalloc.stop()
    assert peaks_bytes[1] < 1.5 * peaks_bytes[0]


@pytest.fixture
def loader_of(dataset, make_dataset):
    """Return a function that makes loaders, which are closed after the test."""
    loaders = []

    def make(samples=None, **changes) -> MicroBatchLoader:
        config = config_of(micro_batch_size=4, **changes)
        source = dataset
        if samples is not None:
            source = TokenDataset.open(make_dataset(samples, vocab_size=128))
        plan = make_plan(config, len(source), world_size=1)
        ranks = join_ranks(config, environment={})
        loaders.append(MicroBatchLoader(source, config, plan, ranks))
        return loaders[-1]

    yield make
    # The workers of the last loader are running, and stop in order.
    for loader in reversed(loaders):
        loader.close()


def take_steps(loader, count):
    """Return the next steps: content of their micro-batches, and their samples."""
    steps = []
    for _ in range(count):
        batches = loader.next_step(lambda loaded, number: list(islice(loaded, number)))
        contents = [content_of(batch) for batch in batches]
        steps.append((contents, loader.samples.tolist()))
    return steps


WORKERS_AND_LAYOUTS = [
    pytest.param(layout, workers, id=f"{layout}-{workers}")
    for workers in (0, 1, 3)
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("layout", "workers"), WORKERS_AND_LAYOUTS)
def test_position_after_a_step(loader_of, layout, workers):
    loader = loader_of(
        layout=layout, data=DataSettings(num_workers=workers, prefetch_factor=3)
    )
    assert loader.job_position() == loader.position
    loader.start_at(loader.position)
    take_steps(loader, 3)
    position = loader.job_position()
    assert position == loader.position
    assert (position.steps, position.rows) == (3, 24)


@pytest.mark.parametrize(("layout", "workers"), WORKERS_AND_LAYOUTS)
def test_loader_restarts_at_a_position(loader_of, layout, workers):
    loader = loader_of(
        layout=layout, data=DataSettings(num_workers=workers, prefetch_factor=3)
    )
    loader.start_at(loader.position)
    before = take_steps(loader, 3)
    position = loader.job_position()
    after = take_steps(loader, 3)
    assert all(len(batches) == 2 and samples for batches, samples in after)
    assert before[0] not in after
    loader.start_at(position)  # as after a rollback
    assert take_steps(loader, 3) == after


@pytest.mark.parametrize(("layout", "workers"), WORKERS_AND_LAYOUTS)
def test_steps_do_not_depend_on_workers(loader_of, layout, workers):
    loader = loader_of(
        layout=layout, data=DataSettings(num_workers=workers, prefetch_factor=3)
    )
    loader.start_at(loader.position)
    take_steps(loader, 3)
    position = loader.job_position()
    after = take_steps(loader, 3)
    end = loader.position
    loader.close()

    other = loader_of(layout=layout)
    other.start_at(position)
    first = other.wait_for_first()  # which takes nothing
    other.check_first_step()
    assert other.position == position
    assert [content_of(batch) for batch in first] == after[0][0]
    assert take_steps(other, 3) == after
    assert other.position == end


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
    while True:
        ((batches, step_samples),) = take_steps(loader, 1)
        if not batches:
            break
        taken_samples += step_samples
    assert sorted(taken_samples) == list(range(samples))
    assert step_samples == []


@pytest.mark.parametrize("is_stuck", [False, True])
def test_close_stops_workers(loader_of, monkeypatch, is_stuck):
    other_processes = set(multiprocessing.active_children())
    loader = loader_of(data=DataSettings(num_workers=2))
    loader.start_at(loader.position)
    loader.wait_for_first()
    workers = set(multiprocessing.active_children()) - other_processes
    assert len(workers) == 2
    take_steps(loader, 2)
    if is_stuck:  # as in a file system that does not respond
        # Time for which torch waits for each worker.
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
        os.kill(min(worker.pid for worker in workers), signal.SIGSTOP)
    loader.close()
    try:
        for worker in workers:
            worker.join(10)
            assert not worker.is_alive()
        if not is_stuck:  # torch reports a worker that is killed as a failure
            assert {worker.exitcode for worker in workers} == {0}
    finally:
        for worker in workers:
            worker.kill()


def test_accepts_ranks_without_shared_samples():
    check_no_shared_samples([])
    check_no_shared_samples(
        [np.array([1, 2]), np.array([], dtype=np.int64), np.array([3, 4])]
    )


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        pytest.param(
            [[9], [1, 2, 3], [3, 4, 2]],
            "ranks 1 and 2 received 2 samples in common",
            id="two ranks",
        ),
        pytest.param([[9], [1, 1]], "a rank received a sample twice", id="one rank"),
    ],
)
def test_rejects_shared_samples(samples, message):
    with pytest.raises(BadConfig, match=message):
        check_no_shared_samples([np.array(numbers) for numbers in samples])
