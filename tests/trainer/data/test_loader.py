import gc
import multiprocessing
import os
import signal
import tracemalloc
from dataclasses import dataclass
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
PAD_ID = 0
CLS_ID = 2
SEP_ID = 3
SPECIAL_TOKENS = 2
"""Tokens that frame every sample: [CLS] and [SEP]."""
ORDINARY_ID = 50
BATCHES = 30
"""Micro-batches of a test that looks at several."""


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


def small_config(**changes) -> TrainConfig:
    """Return a configuration of one small micro-batch per step."""
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
    """Return the first ``count`` micro-batches of a rank."""
    plan = make_plan(config, len(dataset), world_size)
    plans = islice(micro_batch_plans(dataset, config, plan, rank), count)
    loader = make_loader(source_class(dataset, config, plan), config, plans)
    return list(islice(loader, count))


def content_of(batch: MicroBatch) -> tuple[bytes, ...]:
    """Return all tensors of a micro-batch, in a form that can be compared."""
    tensors = (
        batch.ids_BS,
        batch.starts_N,
        batch.tokens_N,
        batch.predicted_P,
        batch.targets_P,
    )
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


def test_samples_are_framed_by_special_tokens(dataset, layout):
    seq_length_tokens = 32
    config = small_config(layout=layout, seq_length_tokens=seq_length_tokens)
    plan = make_plan(config, len(dataset), world_size=1)
    source = MicroBatchSource(dataset, config, plan)
    plans = micro_batch_plans(dataset, config, plan, rank=0)
    for micro_batch_plan in islice(plans, BATCHES):
        batch = source.__getitems__(micro_batch_plan)
        ids = batch.wide_ids_BS().flatten().numpy()
        # As they were before they were masked.
        ids[batch.predicted_P] = batch.targets_P
        expected = np.full(len(ids), PAD_ID, dtype=np.int64)
        samples = micro_batch_plan.segments.samples.tolist()
        for sample, start in zip(samples, batch.starts_N.tolist(), strict=True):
            body = dataset.read(sample, seq_length_tokens - SPECIAL_TOKENS)
            framed = [CLS_ID, *body, SEP_ID]
            expected[start : start + len(framed)] = framed
        assert ids.tolist() == expected.tolist()
        assert batch.non_padding_tokens == (expected != PAD_ID).sum()


def test_ids_keep_their_stored_type(dataset):
    for batch in load(dataset, small_config(), BATCHES):
        assert batch.ids_BS.dtype == batch.targets_P.dtype == torch.uint16


def test_predicted_tokens_are_counted(dataset):
    for batch in load(dataset, small_config(), BATCHES):
        assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)


@pytest.fixture
def varied_dataset(make_dataset):
    """A dataset of three short and three long samples."""
    lengths = (3, 4, 5, 200, 201, 202)
    samples = [[ORDINARY_ID] * length for length in lengths]
    return TokenDataset.open(make_dataset(samples))


def test_dynamic_width_is_the_longest_sample(varied_dataset):
    config = small_config(
        layout="dynamic", seq_length_tokens=150, micro_batch_size=2, global_batch_size=6
    )
    for batch in load(varied_dataset, config, 3):
        # Including special tokens, and after long samples are cut.
        longest = int(batch.tokens_N.max())
        assert longest <= 150
        assert batch.ids_BS.shape == (2, longest)


def test_bucketed_width_is_rounded_up(varied_dataset):
    config = small_config(
        layout="bucketed",
        seq_length_tokens=512,
        micro_batch_size=3,
        global_batch_size=6,
    )
    shapes = [batch.ids_BS.shape for batch in load(varied_dataset, config, 2)]
    # Up to 7 and 204 tokens, rounded up to multiples of 64.
    assert shapes == [(3, 64), (3, 256)]


def test_workers_are_forked_whatever_pythons_default(dataset):
    class NotImportable(MicroBatchSource):
        """A class that no other process could import."""

    start_method = multiprocessing.get_start_method()
    # The default since Python 3.14.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        config = small_config(data=DataSettings(num_workers=1))
        batches = load(dataset, config, 2, source_class=NotImportable)
        assert len(batches) == 2
    finally:
        multiprocessing.set_start_method(start_method, force=True)


SAMPLE_TOKENS = 5 + SPECIAL_TOKENS
"""Length of the only sample of ``tiny_dataset`` in a sequence."""


@pytest.fixture
def tiny_dataset(make_dataset):
    """A dataset of one sample, which every epoch repeats."""
    return TokenDataset.open(make_dataset([[ORDINARY_ID] * 5]))


@pytest.fixture
def half_empty_batch(tiny_dataset):
    """A micro-batch of two sequences, of which the second is empty.

    The global batch of three sequences gives one to the second of two ranks.
    """
    config = small_config(global_batch_size=3)
    (batch,) = load(tiny_dataset, config, 1, world_size=2, rank=1)
    assert batch.ids_BS.shape[0] == 2
    return batch


def test_empty_sequence_adds_no_tokens(half_empty_batch):
    assert half_empty_batch.non_padding_tokens == SAMPLE_TOKENS


def test_empty_sequence_has_no_labels(half_empty_batch):
    assert (half_empty_batch.labels_BS()[1] == IGNORED_LABEL).all()


def test_one_padding_token_of_an_empty_sequence_is_attended_to(half_empty_batch):
    # A softmax over no token would be NaN.
    lengths = half_empty_batch.attention_BS().sum(dim=1).tolist()
    assert lengths == [SAMPLE_TOKENS, 1]


def test_micro_batch_after_the_last_epoch_is_empty(tiny_dataset):
    config = small_config(global_batch_size=1, max_epochs=1)
    first, second = load(tiny_dataset, config, 2)
    assert first.non_padding_tokens == SAMPLE_TOKENS
    assert second.non_padding_tokens == 0
    assert second.predicted_tokens == 0


@pytest.fixture
def free_loaders():
    """Free loaders that the traceback of an error has kept, so that their workers exit.

    At the end of all tests it would be too late: workers ignore the signal that
    multiprocessing sends then, and it would wait for them without end.
    """
    yield
    gc.collect()


@pytest.mark.usefixtures("free_loaders")
@pytest.mark.parametrize("workers", [0, 1])
def test_rejects_ids_beyond_the_vocabulary(make_dataset, workers):
    directory = make_dataset([[ORDINARY_ID] * 5] * 8, vocab_size=128)
    (tokens_file,) = directory.glob("train-tokens-*")
    tokens = np.load(tokens_file)
    tokens[-1] = 60_000
    np.save(tokens_file, tokens)
    config = small_config(data=DataSettings(num_workers=workers))
    with pytest.raises(BadConfig) as raised:
        load(TokenDataset.open(directory), config, 2)
    assert "contains ids that exceed its vocabulary" in raised.value.message
    assert "autotune data verify" in raised.value.next_step


def test_memory_does_not_grow_with_batches_read(dataset, layout):
    config = small_config(layout=layout, seq_length_tokens=64)
    plan = make_plan(config, len(dataset), world_size=1)
    loader = make_loader(
        MicroBatchSource(dataset, config, plan),
        config,
        micro_batch_plans(dataset, config, plan, rank=0),
    )

    def peak_bytes_over(batches):
        tracemalloc.reset_peak()
        for _ in range(batches):
            next(loader)
        _, peak_bytes = tracemalloc.get_traced_memory()
        return peak_bytes

    tracemalloc.start()
    first_peak_bytes = peak_bytes_over(600)
    # If every batch left something behind, four times as many would leave four times
    # as much, in addition to the first ones.
    later_peak_bytes = peak_bytes_over(2400)
    tracemalloc.stop()
    assert later_peak_bytes < 1.5 * first_peak_bytes


GLOBAL_BATCH = 8
"""Sequences of a step of ``loader_of``, in two micro-batches."""


@pytest.fixture
def loader_of(dataset, make_dataset):
    """Return a function that makes loaders, which are closed after the test.

    Its argument is a list of samples, or None for those of ``dataset``.
    """
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


@dataclass(frozen=True)
class TakenStep:
    """One step of a loader, in a form that can be compared."""

    contents: list[tuple[bytes, ...]]
    """Content of each micro-batch."""
    samples: list[int]


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
    assert position.rows == 3 * GLOBAL_BATCH


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
    # Time for which torch waits for each worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    stuck_worker = min(workers, key=lambda worker: worker.pid)
    # As in a file system that does not respond.
    os.kill(stuck_worker.pid, signal.SIGSTOP)
    loader.close()
    assert all(has_ended(worker) for worker in workers)


def test_accepts_ranks_without_shared_samples():
    no_samples = np.array([], dtype=np.int64)
    check_no_shared_samples([np.array([1, 2]), no_samples, np.array([3, 4])])


def test_accepts_job_without_ranks():
    check_no_shared_samples([])


@pytest.mark.parametrize(
    ("samples_by_rank", "message"),
    [
        pytest.param(
            [[9], [1, 2, 3], [3, 4, 2]],
            "ranks 1 and 2 received 2 samples in common",
            id="two ranks",
        ),
        pytest.param([[9], [1, 1]], "a rank received a sample twice", id="one rank"),
    ],
)
def test_rejects_shared_samples(samples_by_rank, message):
    with pytest.raises(BadConfig, match=message):
        check_no_shared_samples([np.array(samples) for samples in samples_by_rank])
