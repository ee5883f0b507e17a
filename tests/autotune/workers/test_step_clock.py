"""Steps that have their own data are timed by their optimizer."""

import math
import time

import pytest
import torch

from autotune.subjects.own.subject import LOOP
from autotune.subjects.subject import FACTS, StepFacts
from autotune.trials.jobs.rank_group import RankGroup
from autotune.workers.jobs.step_clock import StepClock
from autotune.workers.jobs.window import measure
from autotune.workers.values import CallTable, WindowRequest
from trainer.formats.errors import BadConfig

ALONE = RankGroup(rank=0, world_size=1, device=torch.device("cpu"))
LOAD_S = 0.002


class Step:
    """A step with a model of its own, which counts its calls."""

    def __init__(self, accumulated=1):
        self.weight = torch.zeros(4, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.accumulated = accumulated
        self.calls = 0

    def __call__(self):
        self.calls += 1
        (self.weight - 1).square().sum().backward()
        if self.calls % self.accumulated == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def clock(steps=5, warm_up_steps=2):
    return StepClock(ALONE, warm_up_steps=warm_up_steps, steps_to_time=lambda _: steps)


def endless(step):
    """Return a training loop over a step."""

    def train():
        while True:
            step()

    train.__dict__[LOOP] = True
    return train


def test_called_step_is_stopped():
    timed, step = clock(), Step()
    timed.run(lambda: step, "mine")
    assert (timed.warm_up, timed.steps, step.calls) == (2, 5, 7)
    assert timed.micro_batches == 5
    assert timed.end_s >= timed.start_s


def test_accumulating_calls_are_micro_batches():
    timed = clock(steps=3)
    timed.run(lambda: Step(accumulated=4), "mine")
    assert (timed.steps, timed.micro_batches) == (3, 12)


def test_step_without_an_optimizer_counts_by_calls():
    timed = clock()
    timed.run(lambda: lambda: None, "mine")
    assert (timed.steps, timed.micro_batches) == (5, 5)


def test_loop_is_stopped_from_inside():
    timed, step = clock(), Step()
    timed.run(lambda: endless(step), "mine")
    assert (timed.steps, step.calls) == (5, 7)


def test_function_that_trains_is_stopped():
    timed, step = clock(), Step()
    timed.run(endless(step), "mine")
    assert timed.steps == 5


def test_loop_counts_the_micro_batches_of_its_facts():
    loop = endless(Step())
    loop.__dict__[FACTS] = StepFacts(micro_batches=4)
    timed = clock(steps=3)
    timed.run(lambda: loop, "mine")
    assert timed.micro_batches == 12


def test_steps_of_building_do_not_count():
    def build():
        step = Step()
        step()
        return step

    timed = clock()
    timed.run(build, "mine")
    assert timed.warm_up == 2


def test_training_that_ends_early_says_so():
    def train():
        step = Step()
        for _ in range(4):
            step()

    with pytest.raises(BadConfig, match="mine ended after 4 optimizer steps"):
        clock().run(train, "mine")


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, number):
        time.sleep(LOAD_S)
        return torch.zeros(1)


def test_waits_for_data_loaders_are_counted():
    def train():
        step = Step()
        for _ in torch.utils.data.DataLoader(Slow(), batch_size=None):
            step()

    timed = clock(steps=10)
    timed.run(train, "mine")
    assert timed.waited_s >= 10 * LOAD_S
    assert timed.waited_s <= timed.end_s - timed.start_s


def test_window_has_the_units_of_its_steps():
    request = WindowRequest(
        step=CallTable(function="mine:build_step"),
        loader=None,
        unit="samples",
        device="cpu",
        cached=True,
        round=0,
        interleaved_with=[],
        window_s=0.05,
        min_steps=2,
        local_ranks=1,
        replayed_step_s=None,
        source_sha256="",
        storage="",
        units_per_micro_batch=8.0,
    )
    figures = measure(request, ALONE, None, lambda device: Step(), {})
    seconds = figures["window_end_s"] - figures["window_start_s"]
    assert figures["unit"] == "samples"
    assert math.isclose(figures["units_per_s"], 8 * figures["steps"] / seconds)
    assert figures["steps"] >= 2
