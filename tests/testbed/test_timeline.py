"""Simulated machines: remedies only help, and records read like the trainer's."""

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
def test_gradients_wait_for_the_last_rank(
    seed: int,
) -> None:
    _, marks = played(seed)
    if marks.reduced.shape[2] > 1:
        last = marks.departed.max(axis=2, keepdims=True)
        assert (marks.reduced >= last - 1e-9).all()


def test_fast_loader_makes_nobody_wait() -> None:
    _, marks = played(1)
    assert marks.waited_s[1:, REMEDIES.index("data loading")].max() == pytest.approx(
        0, abs=1e-9
    )
    assert marks.waited_s[1:, REMEDIES.index(NOTHING)].max() > 0


class TestRecord:
    def test_same_seed_gives_same_run(self) -> None:
        assert simulated_run(3).run == simulated_run(3).run

    @pytest.mark.parametrize("seed", [3, 4, 11, 12])
    def test_figures_of_all_ranks_arrive_later(self, seed: int) -> None:
        simulated = simulated_run(seed)
        assert simulated.machine.world_size > 1
        late = 2 if simulated.machine.device.on_gpu else 1
        is_known = [row.slowest_rank is not None for row in simulated.run.steps]
        assert is_known == [number >= late for number in range(len(is_known))]

    @pytest.mark.parametrize("seed", SEEDS)
    def test_parts_fit_in_their_step(self, seed: int) -> None:
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
        simulated = simulated_run(seed)
        interval = simulated.machine.train.logged_steps
        assert all(row.step % interval == 0 for row in simulated.run.steps[:-1])
        assert simulated.run.steps[-1].step == simulated.machine.steps

    @pytest.mark.parametrize("seed", SEEDS)
    def test_limit_is_the_best_remedy(self, seed: int) -> None:
        simulated = simulated_run(seed)
        saved = {
            name: share
            for name, share in simulated.saved.items()
            if name not in (NOTHING, "launches")
        }
        best = max(saved, key=saved.__getitem__)
        assert simulated.cause == (best if saved[best] >= 0.1 else "compute")
