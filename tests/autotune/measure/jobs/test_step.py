import math
from dataclasses import dataclass, field

import pytest

from autotune.measure.jobs import step


@dataclass
class ScriptedRanks:
    """Rank 0 of some, whose other ranks' numbers are given."""

    others: dict[str, list[list[float]]] = field(default_factory=dict)
    local_world_size: int = 2
    local_rank: int = 1
    rank: int = 1

    def each(self, value):
        return [value, *self.others["each"].pop(0)]

    def max(self, *values):
        return [max(pair) for pair in zip(values, self.others["max"].pop(0), strict=True)]


class Budget:
    outside_allocator_bytes = 7

    def peak_bytes(self):
        return 100


def figures_of(peaks=(300.0,), steps=(2.0,), loss=1.5):
    ranks = ScriptedRanks({"each": [list(peaks), list(steps)], "max": [[0.1, 0.4], [9.0]]})
    return step._of_all(ranks, Budget(), [0.2, 0.3], loss)


def test_figures_are_those_of_the_slowest_and_of_the_fullest_rank():
    assert figures_of() == {
        "optimizer_steps": 2, "step_s": [0.2, 0.4], "peak_bytes": 300, "peak_bytes_by_rank": [100, 300],
        "outside_allocator_bytes": 9, "local_ranks": 2, "loss": 1.5,
    }  # fmt: skip


def test_ranks_that_took_different_numbers_of_steps_have_no_figures():
    with pytest.raises(ValueError, match="different numbers of steps"):
        figures_of(steps=(1.0,))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_of_all_ranks_that_is_no_number_is_noticed(loss):
    with pytest.raises(ValueError, match=f"the loss is {loss}"):
        figures_of(loss=loss)


@pytest.mark.parametrize(("place", "expected"), [({}, 50), ({"budget_bytes_by_rank": [10, 20]}, 20)])
def test_a_budget_is_everybodys_unless_each_has_its_own(place, expected):
    assert step._budget_bytes({"memory_budget_bytes": 50}, place, ScriptedRanks()) == expected


@pytest.mark.parametrize(("given", "expected"), [(5, 5), ([5, 6], 6), (None, None)])
def test_use_from_before_may_differ_between_the_gpus_of_local_ranks(given, expected):
    assert step._used_before_bytes({"device_used_before_bytes": given}, ScriptedRanks()) == expected
