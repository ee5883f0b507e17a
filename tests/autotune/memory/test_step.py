"""Optimizer steps: figures over all ranks, and steps in flight on a simulated GPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from autotune.memory.jobs import step
from autotune.memory.jobs.step import StepsTaken
from autotune.memory.values import StepRequest
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig

STEPS = StepsTaken(step_s=[0.2, 0.3], loss=1.5, model_flops_per_step=7.0)
BUDGET = SimpleNamespace(non_pytorch_bytes=7, peak_bytes=lambda: 100)


class WithAnotherRank:
    """Ranks of a job of two; the other one's numbers are fixed.

    Args:
        steps: Number of steps that the other rank took.
    """

    local_world_size = 2

    def __init__(self, steps: float = 2.0) -> None:
        # In the order in which the job gathers them: peak memory, number of steps.
        self._gathered = iter([300.0, steps])
        # Seconds of both steps, non-PyTorch memory.
        self._maxima = iter([[0.1, 0.4], [9.0]])

    def all_gather_float(self, value):
        return [value, next(self._gathered)]

    def all_reduce_max(self, *values):
        pairs = zip(values, next(self._maxima), strict=True)
        return [max(pair) for pair in pairs]

    def all_reduce_sum(self, value):
        """Return the sum with the same number on the other rank."""
        return [2 * value]


def test_figures_are_those_of_the_worst_rank():
    figures = step.gather_figures(WithAnotherRank(), BUDGET, STEPS, warmup_steps=0)
    assert figures == {
        "optimizer_steps": 2,
        "step_s": [0.2, 0.4],
        "peak_bytes": 300,
        "peak_bytes_by_rank": [100, 300],
        "non_pytorch_bytes": 9,
        "local_ranks": 2,
        "loss": 1.5,
        "model_flops_per_step": 14.0,
    }


def test_step_times_leave_out_warm_up():
    figures = step.gather_figures(WithAnotherRank(), BUDGET, STEPS, warmup_steps=1)
    assert figures["optimizer_steps"] == 2
    assert figures["step_s"] == [0.4]


def test_rejects_different_numbers_of_steps():
    with pytest.raises(ValueError, match="different numbers of steps"):
        step.gather_figures(WithAnotherRank(steps=1.0), BUDGET, STEPS, warmup_steps=0)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_rejects_a_loss_that_is_not_finite(loss):
    steps = StepsTaken(step_s=[0.2, 0.3], loss=loss, model_flops_per_step=7.0)
    with pytest.raises(ValueError, match=f"the loss is {loss}"):
        step.gather_figures(WithAnotherRank(), BUDGET, steps, warmup_steps=0)


LAUNCH_S = 0.1
"""Seconds in which the simulated host launches a step."""
STEP_S = 0.3
"""Seconds in which the simulated GPU takes it."""
STEP_FLOPS = 7.0


class SimulatedEvent:
    """Event that a simulated GPU reaches at a known time."""

    def __init__(self, gpu, at_s):
        self._gpu = gpu
        self.at_s = at_s

    def wait(self):
        self._gpu.host_s = max(self._gpu.host_s, self.at_s)

    def seconds_since(self, earlier):
        return self.at_s - earlier.at_s


class SimulatedGpu:
    """Training whose steps queue on a GPU that is slower than the host."""

    def __init__(self):
        self.step = self
        self.work = SimpleNamespace(step_flops=lambda lengths, predicted: STEP_FLOPS)
        self.host_s = 0.0
        """Time on the host's clock."""
        self._busy_until_s = 0.0
        self._step_ends_s = []
        self._is_rehearsed = False
        self.most_in_flight = 0
        """Most steps that the GPU had not finished at the launch of one."""

    def mark(self, _device):
        return SimulatedEvent(self, max(self._busy_until_s, self.host_s))

    def rehearse(self, _batch):
        self._is_rehearsed = True

    def run(self, _batches, _learning_rate):
        """Launch a step."""
        assert self._is_rehearsed
        self.host_s += LAUNCH_S
        unfinished = [end_s for end_s in self._step_ends_s if end_s > self.host_s]
        self.most_in_flight = max(self.most_in_flight, len(unfinished) + 1)
        self._busy_until_s = max(self._busy_until_s, self.host_s) + STEP_S
        self._step_ends_s.append(self._busy_until_s)
        return SimpleNamespace(loss=1.5)


@pytest.fixture
def prepared(monkeypatch):
    """Return the micro-batches that the job makes, which have one token each."""
    batches = []

    def make_batch(*_, **__):
        batch = SimpleNamespace(tokens_N=torch.ones(1), predicted_tokens=3)
        batches.append(batch)
        return batch

    monkeypatch.setattr(step, "fullest_batch", make_batch)
    return batches


def test_two_steps_are_in_flight(monkeypatch, prepared):
    gpu = SimulatedGpu()
    monkeypatch.setattr(step, "mark", gpu.mark)
    monkeypatch.setattr(step, "build_training", lambda *_: gpu)
    monkeypatch.setattr(step, "make_optimizer_state", lambda _: None)
    monkeypatch.setattr(step, "evaluate_once", lambda *_: None)
    config = TrainConfig(
        model=model_settings("bert-mini"),
        device="cuda",
        micro_batch_size=4,
        global_batch_size=4,
        data={"pin_memory": False},
    )
    request = StepRequest.model_construct(
        config=config,
        vocab_size=99,
        special_ids=None,
        warmup_steps=3,
        timed_steps=10,
        documents_per_sequence=1.0,
    )
    ranks = SimpleNamespace(
        device="cuda", rank=0, world_size=1, all_reduce_sum=lambda _: None
    )
    steps = step.take_steps(request, ranks)
    assert steps.loss == 1.5
    assert steps.model_flops_per_step == STEP_FLOPS
    assert len(prepared) == step.PREPARED
    assert gpu.most_in_flight == step.IN_FLIGHT
    assert steps.step_s[3:] == pytest.approx([STEP_S] * 10)
