import multiprocessing
import os
import signal
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import write_dataset
from tests.trainer.oracles import config_of
from trainer import feed
from trainer.batch import make_plan
from trainer.config import DataSettings, ModelSettings, TrainConfig
from trainer.dataset import TokenDataset
from trainer.errors import BadConfig
from trainer.feed import DataWait, MicroBatch, MicroBatchSource, Supply, make_loader, micro_batch_plans
from trainer.masking import IGNORED_LABEL
from trainer.parallel import join_ranks
from trainer.stopwatch import Mark

LAYOUTS = ("padded", "dynamic", "bucketed", "packed")


def _config(**changes) -> TrainConfig:
    settings = {
        "model": ModelSettings(name="m", config={"model_type": "bert"}),
        "seq_length_tokens": 16,
        "micro_batch_rows": 4,
        "global_batch_rows": 4,
    }
    return TrainConfig(**settings | changes)


def batches(dataset: TokenDataset, config: TrainConfig, count: int, world: int = 1, rank: int = 0, start=None):
    plan = make_plan(config, len(dataset), world)
    plans = micro_batch_plans(dataset, config, plan, rank, position=start)
    return list(islice(make_loader(MicroBatchSource(dataset, config, plan), config, islice(plans, count)), count))


def content(batch: MicroBatch) -> tuple[bytes, ...]:
    tensors = (batch.ids_BS, batch.starts_N, batch.tokens_N, batch.predicted_P, batch.targets_P)
    return tuple(tensor.numpy().tobytes() for tensor in tensors)


def restored(batch: MicroBatch) -> np.ndarray:
    """The ids before they were corrupted, flattened."""
    ids = batch.wide_ids_BS().flatten()
    ids[batch.predicted_P.long()] = batch.targets_P.long()
    return ids.numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_framed_in_their_places_and_the_rest_is_padding(patterned_dataset, layout):
    dataset = TokenDataset.open(patterned_dataset)
    config = _config(layout=layout, seq_length_tokens=32)
    plan = make_plan(config, len(dataset), 1)
    source = MicroBatchSource(dataset, config, plan)
    for micro_plan in islice(micro_batch_plans(dataset, config, plan, 0), 30):
        batch = source.__getitems__(micro_plan)
        ids = restored(batch)
        expected = np.zeros(len(ids), dtype=np.int64)
        for sample, start in zip(micro_plan.segments.samples.tolist(), batch.starts_N.tolist(), strict=True):
            body = dataset.read(sample, 30)
            expected[start : start + len(body) + 2] = [2, *body, 3]
        assert ids.tolist() == expected.tolist()
        assert batch.real_tokens == (expected != 0).sum()
        assert batch.predicted_tokens == len(batch.predicted_P) == len(batch.targets_P)


def test_ids_travel_as_they_are_stored(patterned_dataset):
    (batch,) = batches(TokenDataset.open(patterned_dataset), _config(), 1)
    assert batch.ids_BS.dtype == batch.targets_P.dtype == torch.uint16
    assert batch.starts_N.dtype == batch.tokens_N.dtype == batch.predicted_P.dtype == torch.int32
    assert batch.wide_ids_BS().dtype == torch.int64


def test_rows_are_framed_padded_and_cut(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5, [60] * 100]))
    (batch,) = batches(dataset, _config(global_batch_rows=2), 1)
    assert sorted(batch.attention_BS().sum(dim=1).tolist()) == [7, 16]
    assert batch.real_tokens == 23
    assert (batch.ids_BS[:, 0].long() == 2).all()
    assert (batch.wide_ids_BS()[batch.attention_BS() == 0] == 0).all()


def test_labels_are_the_targets_in_their_places(patterned_dataset):
    (batch,) = batches(TokenDataset.open(patterned_dataset), _config(masking_probability=0.5), 1)
    labels = batch.labels_BS()
    assert int((labels != IGNORED_LABEL).sum()) == batch.predicted_tokens > 0
    assert labels.flatten()[batch.predicted_P.long()].tolist() == batch.targets_P.long().tolist()


def test_dynamic_rows_are_as_wide_as_the_longest_of_their_micro_batch(make_dataset):
    lengths = (3, 4, 5, 200, 201, 202)
    dataset = TokenDataset.open(make_dataset([[50] * length for length in lengths]))
    config = _config(layout="dynamic", seq_length_tokens=150, micro_batch_rows=2, global_batch_rows=6)
    for batch in batches(dataset, config, 3):
        assert batch.ids_BS.shape == (2, int(batch.tokens_N.max()))
        assert batch.ids_BS.shape[1] <= 150


def test_bucketed_rows_are_as_wide_as_the_longest_needs(make_dataset):
    samples = [[50] * length for length in (3, 4, 5, 200, 201, 202)]
    config = _config(layout="bucketed", seq_length_tokens=512, micro_batch_rows=3, global_batch_rows=6)
    short, long = batches(TokenDataset.open(make_dataset(samples)), config, 2)
    assert short.ids_BS.shape == (3, 64)
    assert long.ids_BS.shape == (3, 256)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_loader_processes_change_nothing_about_the_batches(patterned_dataset, layout, workers):
    dataset = TokenDataset.open(patterned_dataset)
    alone = batches(dataset, _config(layout=layout), 12)
    config = _config(layout=layout, data=DataSettings(loader_workers=workers, prefetch_batches=3))
    shared = batches(dataset, config, 12)
    assert [content(batch) for batch in alone] == [content(batch) for batch in shared]
    assert [batch.after for batch in alone] == [batch.after for batch in shared]


def test_loader_processes_are_forked_whatever_pythons_default_is(patterned_dataset):
    class Unsendable(MicroBatchSource):
        """A class that no other process could import."""

    dataset, config = TokenDataset.open(patterned_dataset), _config(data=DataSettings(loader_workers=1))
    plan = make_plan(config, len(dataset), 1)
    plans = islice(micro_batch_plans(dataset, config, plan, 0), 2)
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)  # the default since Python 3.14
    try:
        loader = make_loader(Unsendable(dataset, config, plan), config, plans)
        assert len(list(islice(loader, 2))) == 2
    finally:
        multiprocessing.set_start_method(before, force=True)


@settings(deadline=None, max_examples=25)
@given(
    layout=st.sampled_from(LAYOUTS),
    before=st.integers(0, 6),
    accumulation=st.integers(1, 2),
    seed=st.integers(0, 5),
)
def test_starting_anywhere_continues_bit_for_bit(patterned_dataset, layout, before, accumulation, seed):
    dataset = TokenDataset.open(patterned_dataset)
    config = _config(layout=layout, seed=seed, global_batch_rows=4 * accumulation)
    whole = batches(dataset, config, (before + 3) * accumulation)
    position = whole[before * accumulation - 1].after if before else None
    rest = batches(dataset, config, 3 * accumulation, start=position)
    assert [content(batch) for batch in whole[before * accumulation :]] == [content(batch) for batch in rest]


def test_the_corrupted_samples_do_not_depend_on_the_number_of_ranks(patterned_dataset):
    dataset = TokenDataset.open(patterned_dataset)

    def rows(world: int) -> list[bytes]:
        config = _config(layout="packed", global_batch_rows=12)
        found = []
        for rank in range(world):
            for batch in batches(dataset, config, 3 * make_plan(config, 400, world).accumulation_steps, world, rank):
                found += [row.tobytes() for row in batch.ids_BS.numpy() if row.any()]
        return sorted(found)

    assert rows(1) == rows(2) == rows(3)


def test_rows_that_a_rank_lacks_are_empty_and_weigh_nothing(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5] * 10))
    (batch,) = batches(dataset, _config(global_batch_rows=3), 1, world=2, rank=1)
    assert batch.ids_BS.shape[0] == 2
    assert batch.real_tokens == 7
    assert (batch.labels_BS()[1] == IGNORED_LABEL).all()
    assert batch.attention_BS()[1].sum() == 1


def test_a_batch_of_nothing_but_empty_rows_can_be_made(make_dataset):
    dataset = TokenDataset.open(make_dataset([[50] * 5]))
    first, second = batches(dataset, _config(global_batch_rows=1, max_epochs=1), 2)
    assert (first.real_tokens, second.real_tokens, second.predicted_tokens) == (7, 0, 0)


def test_validation_samples_are_read_as_their_own_split(tmp_path):
    directory = write_dataset(tmp_path / "data", [[50] * 5] * 4, validation=[[60] * 3])
    dataset = TokenDataset.open(directory, "validation")
    (batch,) = batches(dataset, _config(global_batch_rows=1), 1)
    assert restored(batch)[:5].tolist() == [2, 60, 60, 60, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_beyond_the_vocabulary_are_refused_and_name_the_check(make_dataset, workers):
    directory = make_dataset([[50] * 5] * 8, vocab_size=128)
    (tokens,) = directory.glob("train-tokens-*")
    content = bytearray(tokens.read_bytes())
    content[-2:] = (60_000).to_bytes(2, "little")
    tokens.write_bytes(content)
    with pytest.raises(BadConfig) as caught:
        batches(TokenDataset.open(directory), _config(data=DataSettings(loader_workers=workers)), 2)
    assert "holds ids that its tokenizer does not have" in caught.value.message
    assert "autotune data verify" in caught.value.next_step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounded_memory_whatever_was_visited(patterned_dataset, layout):
    # What a batch needs is freed with it: the most that is held at once does not grow with what was read.
    dataset = TokenDataset.open(patterned_dataset)
    config = _config(layout=layout, seq_length_tokens=64)
    plan = make_plan(config, len(dataset), 1)
    plans = micro_batch_plans(dataset, config, plan, 0)
    loader = make_loader(MicroBatchSource(dataset, config, plan), config, plans)
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
def supply_of(patterned_dataset):
    made = []

    def make(**changes) -> Supply:
        config = config_of(micro_batch_rows=4, **changes)
        dataset = TokenDataset.open(patterned_dataset)
        plan = make_plan(config, len(dataset), world_size=1)
        made.append(Supply(dataset, config, plan, join_ranks(config, environment={})))
        return made[-1]

    yield make
    for one in reversed(made):  # the last one's loaders are there, and end in order
        one.close()


def steps_of(supply, count):
    """What the next steps are made of: their micro-batches, and the numbers of their samples."""
    taken = []
    for _ in range(count):
        batches = supply.next_step(lambda loader, number: list(islice(loader, number)))
        taken.append(([content(batch) for batch in batches], supply.samples.tolist()))
    return taken


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("layout", ["packed", "bucketed"])
def test_a_supply_that_goes_on_from_a_position_gives_what_an_uninterrupted_one_does(supply_of, layout, workers):
    changes = {"layout": layout, "data": DataSettings(loader_workers=workers)}
    whole = supply_of(**changes)
    whole.start_at(whole.position)
    before = steps_of(whole, 3)
    position = whole.whole_position()
    assert (position.steps, position.rows) == (3, 24)
    after = steps_of(whole, 3)
    assert all(len(batches) == 2 and samples for batches, samples in after)
    assert before[0] not in after
    whole.start_at(position)  # as after a rollback
    assert steps_of(whole, 3) == after
    whole.close()
    again = supply_of(**changes)
    again.start_at(position)
    again.wait_for_first()  # which takes nothing
    assert steps_of(again, 3) == after


def test_a_rank_alone_knows_where_the_whole_job_is(supply_of):
    supply = supply_of()
    assert supply.whole_position() == supply.position
    supply.start_at(supply.position)
    steps_of(supply, 2)
    assert supply.whole_position() == supply.position
    assert supply.position.steps == 2


def test_the_first_step_can_be_looked_at_before_it_is_taken(supply_of):
    supply = supply_of()
    supply.start_at(supply.position)
    first = supply.wait_for_first()
    supply.compare_first()
    assert supply.position.steps == 0
    assert [content(batch) for batch in first] == steps_of(supply, 1)[0][0]


def test_behind_the_last_epoch_there_is_no_step(supply_of):
    supply = supply_of(max_epochs=1, global_batch_rows=200)
    supply.start_at(supply.position)
    taken = steps_of(supply, 4)
    assert taken[0][0]
    assert taken[-1] == ([], [])
    samples = [number for _, numbers in taken for number in numbers]
    assert sorted(samples) == list(range(400))


@pytest.mark.parametrize("is_stuck", [False, True])
def test_to_close_it_ends_its_loader_processes(supply_of, monkeypatch, is_stuck):
    before = set(multiprocessing.active_children())
    supply = supply_of(data=DataSettings(loader_workers=2))
    supply.start_at(supply.position)
    supply.wait_for_first()
    loaders = set(multiprocessing.active_children()) - before
    assert len(loaders) == 2
    steps_of(supply, 2)
    if is_stuck:  # as in a file system that does not answer
        monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # torch's patience with each
        os.kill(min(process.pid for process in loaders), signal.SIGSTOP)
    supply.close()
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


@dataclass(frozen=True)
class Scripted(Mark):
    """A moment in a device's queue that is reached when a script says so."""

    moment: float = ENDED_S
    answers: Iterator[bool] = field(default_factory=lambda: iter(()))

    def reached(self) -> bool:
        return next(self.answers)


class Clock:
    """The host's clock, which passes while the loader is slow, and not otherwise."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(feed, "time", clock)
    return clock


def slow_loader() -> Iterator[str]:
    while True:
        feed.time.now_s += SLOW_S
        yield "batch"


def waited(*answers: bool, count: int = 1) -> float:
    """What is counted, by whether the device had come to its end whenever it is asked; its clock stands at two moments.

    Without an answer it was given nothing yet.
    """
    wait = DataWait(lambda: Mark(CAME_S))
    if answers:
        wait.gave(Scripted(answers=iter(answers)))
    assert wait.take(slow_loader(), count) == ["batch"] * count
    return wait.read()


def test_before_the_first_step_all_of_the_wait_counts():
    assert waited() == pytest.approx(SLOW_S)


def test_a_device_that_had_nothing_to_do_waited_all_the_time():
    assert waited(True) == pytest.approx(SLOW_S)


def test_a_device_that_was_at_work_all_the_time_waited_for_nothing():
    assert waited(False, False) == 0.0


def test_a_device_that_ran_dry_meanwhile_waited_from_its_end_until_the_batch_came():
    assert waited(False, True) == pytest.approx(CAME_S - ENDED_S)


def test_waits_of_all_micro_batches_of_a_step_add_up():
    assert waited(True, True, True, count=3) == pytest.approx(3 * SLOW_S)


def test_a_device_that_ran_dry_waits_wholly_for_the_other_micro_batches_of_the_step():
    assert waited(False, False, False, True, count=3) == pytest.approx(CAME_S - ENDED_S + SLOW_S)


def test_clocks_that_disagree_by_a_little_give_no_negative_wait():
    wait = DataWait(lambda: Mark(ENDED_S - 0.001))
    wait.gave(Scripted(answers=iter((False, True))))
    wait.take(iter(["batch"]), 1)
    assert wait.read() == 0.0


def test_what_was_read_is_not_counted_again():
    wait = DataWait(lambda: Mark(CAME_S))
    wait.gave(Scripted(answers=iter((False, True))))
    wait.take(slow_loader(), 1)
    assert wait.read() == pytest.approx(CAME_S - ENDED_S)
    assert wait.read() == 0.0
    wait.take(slow_loader(), 1)
    assert wait.read() == pytest.approx(SLOW_S)


def test_a_cpu_is_always_ready_for_the_next_batch():
    wait = DataWait(lambda: Mark(1.0))
    wait.gave(Mark(1.0))
    wait.take(slow_loader(), 1)
    assert wait.read() == pytest.approx(SLOW_S)
