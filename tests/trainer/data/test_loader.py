import multiprocessing
import os
import signal
import tracemalloc
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.trainer.oracles import config_of
from trainer.config.train_config import DataSettings, TrainConfig
from trainer.data import loader as feed
from trainer.data.dataset import TokenDataset
from trainer.data.global_batch import make_plan
from trainer.data.loader import (
    DataWait,
    MicroBatch,
    MicroBatchLoader,
    MicroBatchSource,
    make_loader,
    micro_batch_plans,
)
from trainer.data.masking import IGNORED_LABEL
from trainer.distributed.ranks import DeviceEvent, join_ranks
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


def batches(
    dataset: TokenDataset,
    config: TrainConfig,
    count: int,
    world: int = 1,
    rank: int = 0,
) -> list[MicroBatch]:
    plan = make_plan(config, len(dataset), world)
    plans = islice(micro_batch_plans(dataset, config, plan, rank), count)
    return list(
        islice(
            make_loader(MicroBatchSource(dataset, config, plan), config, plans), count
        )
    )


def content(batch: MicroBatch) -> tuple[bytes, ...]:
    tensors = (
        batch.ids_BS,
        batch.starts_N,
        batch.tokens_N,
        batch.predicted_P,
        batch.targets_P,
    )
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_framed_in_their_places_and_the_rest_is_padding(dataset, layout):
    config = _config(layout=layout, seq_length_tokens=32)
    plan = make_plan(config, len(dataset), 1)
    source = MicroBatchSource(dataset, config, plan)
    for micro_plan in islice(micro_batch_plans(dataset, config, plan, 0), 30):
        batch = source.__getitems__(micro_plan)
        ids = batch.wide_ids_BS().flatten().numpy()
        # As they were before they were corrupted.
        ids[batch.predicted_P] = batch.targets_P
        expected = np.zeros(len(ids), dtype=np.int64)
        for sample, start in zip(
            micro_plan.segments.samples.tolist(), batch.starts_N.tolist(), strict=True
        ):
            body = dataset.read(sample, 30)
            expected[start : start + len(body) + 2] = [2, *body, 3]
        assert ids.tolist() == expected.tolist()
        # As they are stored.
        assert batch.ids_BS.dtype == batch.targets_P.dtype == torch.uint16
        assert batch.non_padding_tokens == (expected != 0).sum()
        assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)


def test_dynamic_and_bucketed_rows_are_as_wide_as_the_longest_of_their_micro_batch_needs(
    make_dataset,
):
    dataset = TokenDataset.open(
        make_dataset([[50] * length for length in (3, 4, 5, 200, 201, 202)])
    )
    dynamic = _config(
        layout="dynamic", seq_length_tokens=150, micro_batch_size=2, global_batch_size=6
    )
    for batch in batches(dataset, dynamic, 3):
        assert batch.ids_BS.shape == (2, int(batch.tokens_N.max()))
        assert batch.ids_BS.shape[1] <= 150
    bucketed = _config(
        layout="bucketed",
        seq_length_tokens=512,
        micro_batch_size=3,
        global_batch_size=6,
    )
    assert [batch.ids_BS.shape for batch in batches(dataset, bucketed, 2)] == [
        (3, 64),
        (3, 256),
    ]


def test_loader_processes_are_forked_whatever_pythons_default_is(dataset):
    class Unsendable(MicroBatchSource):
        """A class that no other process could import."""

    config = _config(data=DataSettings(num_workers=1))
    plan = make_plan(config, len(dataset), 1)
    plans = islice(micro_batch_plans(dataset, config, plan, 0), 2)
    before = multiprocessing.get_start_method()
    # The default since Python 3.14.
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert (
            len(
                list(
                    islice(
                        make_loader(Unsendable(dataset, config, plan), config, plans), 2
                    )
                )
            )
            == 2
        )
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_rows_that_a_rank_lacks_are_empty_and_weigh_nothing(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5]))
    (batch,) = batches(dataset, _config(global_batch_size=3), 1, world=2, rank=1)
    assert (batch.ids_BS.shape[0], batch.non_padding_tokens) == (2, 7)
    assert (batch.labels_BS()[1] == IGNORED_LABEL).all()
    assert batch.attention_BS().sum(dim=1).tolist() == [7, 1]
    # Of no row at all.
    first, second = batches(dataset, _config(global_batch_size=1, max_epochs=1), 2)
    assert (
        first.non_padding_tokens,
        second.non_padding_tokens,
        second.predicted_tokens,
    ) == (7, 0, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_beyond_the_vocabulary_are_refused_and_name_the_check(
    make_dataset, workers
):
    directory = make_dataset([[50] * 5] * 8, vocab_size=128)
    (tokens,) = directory.glob("train-tokens-*")
    content = bytearray(tokens.read_bytes())
    content[-2:] = (60_000).to_bytes(2, "little")
    tokens.write_bytes(content)
    with pytest.raises(BadConfig) as caught:
        batches(
            TokenDataset.open(directory),
            _config(data=DataSettings(num_workers=workers)),
            2,
        )
    assert "contains ids that exceed its vocabulary" in caught.value.message
    assert "autotune data verify" in caught.value.next_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounded_memory_whatever_was_visited(dataset, layout):
    # What a batch needs is freed with it: the most that is held at once does not grow
    # with what was read.
    config = _config(layout=layout, seq_length_tokens=64)
    plan = make_plan(config, len(dataset), 1)
    loader = make_loader(
        MicroBatchSource(dataset, config, plan),
        config,
        micro_batch_plans(dataset, config, plan, 0),
    )
    tracemalloc.start()
    peaks = []
    for batches_read in (600, 2400):
        tracemalloc.reset_peak()
        for _ in range(batches_read):
            next(loader)
        peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.fixture
def loader_of(dataset, make_dataset):
    made = []

    def make(samples=None, **changes) -> MicroBatchLoader:
        config = config_of(micro_batch_size=4, **changes)
        source = (
            dataset
            if samples is None
            else TokenDataset.open(make_dataset(samples, vocab_size=128))
        )
        plan = make_plan(config, len(source), world_size=1)
        made.append(
            MicroBatchLoader(source, config, plan, join_ranks(config, environment={}))
        )
        return made[-1]

    yield make
    for one in reversed(made):  # the last one's loaders are there, and end in order
        one.close()


def steps_of(loader, count):
    """What the next steps are made of: their micro-batches, and the numbers of their
    samples."""
    taken = []
    for _ in range(count):
        batches = loader.next_step(lambda made, number: list(islice(made, number)))
        taken.append(([content(batch) for batch in batches], loader.samples.tolist()))
    return taken


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loader_that_goes_on_from_a_position_gives_what_another_with_loader_processes_does(
    loader_of, layout, workers
):
    whole = loader_of(
        layout=layout, data=DataSettings(num_workers=workers, prefetch_factor=3)
    )
    assert whole.job_position() == whole.position
    whole.start_at(whole.position)
    before = steps_of(whole, 3)
    position = whole.job_position()
    assert position == whole.position
    assert (position.steps, position.rows) == (3, 24)
    after = steps_of(whole, 3)
    assert all(len(batches) == 2 and samples for batches, samples in after)
    assert before[0] not in after
    whole.start_at(position)  # as after a rollback
    assert steps_of(whole, 3) == after
    whole.close()
    again = loader_of(layout=layout)
    again.start_at(position)
    first = again.wait_for_first()  # which takes nothing
    again.check_first_step()
    assert again.position == position
    assert [content(batch) for batch in first] == after[0][0]
    assert (steps_of(again, 3), again.position) == (after, whole.position)


@pytest.mark.parametrize(("count", "rows"), [(400, 200), (4200, 4)])
def test_behind_the_last_epoch_there_is_no_step(loader_of, count, rows):
    """Lanes end one by one, so a step of few rows can be empty long before the data is
    over."""
    samples = [
        [5 + (start + step) % 60 for step in range(4 + start % 50)]
        for start in range(count)
    ]
    loader = loader_of(samples, max_epochs=1, global_batch_size=rows)
    loader.start_at(loader.position)
    taken = list(iter(lambda: steps_of(loader, 1)[0], ([], [])))
    assert sorted(number for _, numbers in taken for number in numbers) == list(
        range(count)
    )


@pytest.mark.parametrize("is_stuck", [False, True])
def test_to_close_it_ends_its_loader_processes(loader_of, monkeypatch, is_stuck):
    before = set(multiprocessing.active_children())
    loader = loader_of(data=DataSettings(num_workers=2))
    loader.start_at(loader.position)
    loader.wait_for_first()
    loaders = set(multiprocessing.active_children()) - before
    assert len(loaders) == 2
    steps_of(loader, 2)
    if is_stuck:  # as in a file system that does not answer
        # Torch's patience with each.
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
        os.kill(min(process.pid for process in loaders), signal.SIGSTOP)
    loader.close()
    try:
        for process in loaders:
            process.join(10)
            assert not process.is_alive()
        if not is_stuck:  # torch takes one that is killed for a failure of the training
            assert {process.exitcode for process in loaders} == {0}
    finally:
        for process in loaders:
            process.kill()


SLOW_S = 0.03
ENDED_S, CAME_S = 100.0, 100.25


@pytest.fixture
def slow_loader(monkeypatch):
    """A loader in whose time alone the host's clock passes."""
    clock = SimpleNamespace(now_s=5.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(feed, "time", clock)

    def load() -> Iterator[str]:
        while True:
            clock.now_s += SLOW_S
            yield "batch"

    return load()


@pytest.mark.parametrize(
    ("answers", "count", "came_s", "waited_s"),
    [
        (None, 1, CAME_S, SLOW_S),
        ([True], 1, CAME_S, SLOW_S),
        ([True] * 3, 3, CAME_S, 3 * SLOW_S),
        ([False, False], 1, CAME_S, 0.0),
        ([False, True], 1, CAME_S, CAME_S - ENDED_S),
        ([False, False, False, True], 3, CAME_S, CAME_S - ENDED_S + SLOW_S),
        ([False, True], 1, ENDED_S - 0.001, 0.0),
    ],
    ids=[
        "before the first step",
        "nothing to do",
        "nothing to do for any micro-batch",
        "always at work",
        "ran dry until the batch came",
        "ran dry, and waited wholly for the next micro-batch",
        "clocks that disagree by a little",
    ],
)
def test_the_wait_for_data_is_what_the_device_stood_still(
    slow_loader, answers, count, came_s, waited_s
):
    """The device had come to the end of its work, or not, whenever it is asked."""
    wait = DataWait(lambda: DeviceEvent(came_s))
    if answers is not None:
        wait.device_busy_until(Mock(moment=ENDED_S, reached=Mock(side_effect=answers)))
    assert wait.take(slow_loader, count) == ["batch"] * count
    assert wait.take_waited_s() == pytest.approx(waited_s)
    assert wait.take_waited_s() == 0.0


def test_a_device_that_ran_dry_has_nothing_until_it_is_given_more(slow_loader):
    wait = DataWait(lambda: DeviceEvent(CAME_S))
    wait.device_busy_until(
        Mock(moment=ENDED_S, reached=Mock(side_effect=[False, True]))
    )
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(CAME_S - ENDED_S)
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(SLOW_S)
    wait.device_busy_until(DeviceEvent(1.0))  # of a CPU, which is always ready
    wait.take(slow_loader, 1)
    assert wait.take_waited_s() == pytest.approx(SLOW_S)
