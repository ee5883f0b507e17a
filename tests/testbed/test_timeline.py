"""Simulated machines: remedies only help, and records are read as the trainer's meter
reads them."""

import functools
import itertools

import numpy as np
import pytest

from testbed.simulators.machines import Machine, draw_machine
from testbed.simulators.runs import REMEDIES, simulated_run
from testbed.simulators.timeline import (
    NOTHING,
    Conditions,
    Marks,
    Timeline,
    draw_events,
)

SEEDS = range(16)


@functools.cache
def played(seed: int) -> tuple[Machine, Marks]:
    draw = np.random.default_rng(seed)
    machine = draw_machine("data loading" if seed % 2 else "network", draw)
    conditions = Conditions(
        steps=20,
        world_size=machine.world_size,
        micro_batches=machine.micro_batches,
        log_interval=1,
    )
    return (
        machine,
        Timeline(
            machine, conditions, draw_events(machine, conditions, draw), REMEDIES
        ).run(),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_no_remedy_makes_a_run_longer(seed: int) -> None:
    _, marks = played(seed)
    # Ranks that are made equal take the median one's time, which in single steps is
    # more than the slowest rank's.
    ends = marks.closed[-1, :, 0]
    assert (ends <= ends[REMEDIES.index(NOTHING)] * 1.02).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_marks_of_a_step_are_in_order(seed: int) -> None:
    _, marks = played(seed)
    in_order = (
        marks.began,
        marks.asked,
        marks.counted,
        marks.departed,
        marks.reduced,
        marks.updated,
        marks.closed,
    )
    for before, after in itertools.pairwise(in_order):
        assert (after >= before - 1e-9).all()
    assert (marks.began[1:] >= marks.updated[:-1] - 1e-9).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_there_on_all_ranks_at_once_or_with_a_rank_that_is_late(
    seed: int,
) -> None:
    _, marks = played(seed)
    if marks.reduced.shape[2] > 1:
        last = marks.departed.max(axis=2, keepdims=True)
        assert (marks.reduced >= last - 1e-9).all()


def test_without_a_loader_that_makes_wait_nobody_waits() -> None:
    _, marks = played(1)
    assert marks.waited_s[1:, REMEDIES.index("data loading")].max() == pytest.approx(
        0, abs=1e-9
    )
    assert marks.waited_s[1:, REMEDIES.index(NOTHING)].max() > 0


class TestRecord:
    def test_the_same_seed_is_the_same_run(self) -> None:
        assert simulated_run(3).run == simulated_run(3).run

    @pytest.mark.parametrize("seed", [3, 4, 11, 12])
    def test_what_rows_say_of_all_ranks_is_late_by_one_row_or_by_two_on_gpus(
        self, seed: int
    ) -> None:
        one = simulated_run(seed)
        assert one.machine.world_size > 1
        late = 2 if one.machine.device.on_gpu else 1
        told = [row.slowest_rank is not None for row in one.run.steps]
        assert told == [number >= late for number in range(len(told))]

    @pytest.mark.parametrize("seed", SEEDS)
    def test_parts_of_a_row_are_no_more_than_its_step(self, seed: int) -> None:
        for row in simulated_run(seed).run.steps:
            parts = (
                row.data_wait_s
                + row.compute_s
                + (row.communication_s or 0.0)
                + row.optimizer_s
            )
            assert parts <= row.step_s * 1.001

    @pytest.mark.parametrize("seed", SEEDS)
    def test_logged_steps_follow_the_interval(self, seed: int) -> None:
        one = simulated_run(seed)
        interval = one.machine.train.logged_steps
        assert all(row.step % interval == 0 for row in one.run.steps[:-1])
        assert one.run.steps[-1].step == one.machine.steps

    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_limit_is_the_remedy_that_saves_most(self, seed: int) -> None:
        one = simulated_run(seed)
        saved = {
            name: share
            for name, share in one.saved.items()
            if name not in (NOTHING, "launches")
        }
        best = max(saved, key=saved.__getitem__)
        assert one.cause == (best if saved[best] >= 0.1 else "compute")
