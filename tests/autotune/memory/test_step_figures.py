"""Figures of the ``step`` job over two ranks, of which this process is one."""

import math
from types import SimpleNamespace

import pytest

from autotune.memory.jobs import step
from autotune.memory.jobs.step import StepsTaken

THIS_RANK = StepsTaken(step_s=[0.2, 0.3], loss=1.5, model_flops_per_step=7.0)
THIS_BUDGET = SimpleNamespace(non_pytorch_bytes=7, peak_bytes=lambda: 100)
OTHER_STEP_S = [0.1, 0.4]
OTHER_PEAK_BYTES = 300.0
OTHER_NON_PYTORCH_BYTES = 9.0
OTHER_FLOPS = 8.0


class TwoRanks:
    """This rank and another one, whose figures are fixed.

    Args:
        other_step_count: Number of steps that the other rank took.
    """

    local_world_size = 2

    def __init__(self, other_step_count: int = 2) -> None:
        # In the order in which the job gathers them.
        self._other_gathered = iter([OTHER_PEAK_BYTES, float(other_step_count)])
        self._other_maxima = iter([OTHER_STEP_S, [OTHER_NON_PYTORCH_BYTES]])

    def all_gather_float(self, value):
        return [value, next(self._other_gathered)]

    def all_reduce_max(self, *values):
        pairs = zip(values, next(self._other_maxima), strict=True)
        return [max(pair) for pair in pairs]

    def all_reduce_sum(self, flops):
        return [flops + OTHER_FLOPS]


def gather(*, steps=THIS_RANK, warmup_steps=0, other_step_count=2):
    """Return the figures of both ranks."""
    ranks = TwoRanks(other_step_count)
    return step.gather_figures(ranks, THIS_BUDGET, steps, warmup_steps=warmup_steps)


def test_figures_are_those_of_the_worst_rank():
    assert gather() == {
        "optimizer_steps": 2,
        # The first step is slower on this rank, the second on the other.
        "step_s": [0.2, 0.4],
        "peak_bytes": 300,
        "peak_bytes_by_rank": [100, 300],
        "non_pytorch_bytes": 9,
        "local_ranks": 2,
        "loss": 1.5,
        # The sum, as all ranks compute a step together.
        "model_flops_per_step": 15.0,
    }


def test_step_times_leave_out_warm_up():
    assert gather(warmup_steps=1)["step_s"] == [0.4]


def test_step_count_includes_warm_up():
    assert gather(warmup_steps=1)["optimizer_steps"] == 2


def test_rejects_different_numbers_of_steps():
    with pytest.raises(ValueError, match="different numbers of steps"):
        gather(other_step_count=1)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_rejects_a_loss_that_is_not_finite(loss):
    steps = StepsTaken(step_s=[0.2, 0.3], loss=loss, model_flops_per_step=7.0)
    with pytest.raises(ValueError, match=f"the loss is {loss}"):
        gather(steps=steps)
