import multiprocessing
import os
import signal
from itertools import islice

import pytest

from tests.trainer.oracles import config_of
from tests.trainer.test_feed import content
from trainer.batch import make_plan
from trainer.config import DataSettings
from trainer.dataset import TokenDataset
from trainer.feed import Supply
from trainer.parallel import join_ranks


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
