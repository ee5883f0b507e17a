"""The ``step`` job: figures over all ranks, and steps in flight on a simulated GPU."""

import math
from types import SimpleNamespace

import pytest
import torch

from autotune.memory.jobs import step
from autotune.memory.jobs.step import StepsTaken
from autotune.memory.values import StepRequest
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig

# Figures of two ranks. Each rank's job gathers them, and returns the same figures.

THIS_RANK = StepsTaken(step_s=[0.2, 0.3], loss=1.5, model_flops_per_step=7.0)
THIS_BUDGET = SimpleNamespace(non_pytorch_bytes=7, peak_bytes=lambda: 100)
OTHER_STEP_S = [0.1, 0.4]
OTHER_PEAK_BYTES = 300.0
OTHER_NON_PYTORCH_BYTES = 9.0
OTHER_FLOPS = 7.0


class TwoRanks:
    """Ranks of which this process is one; the figures of the other one are fixed.

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


def gather(ranks=None, *, steps=THIS_RANK, warmup_steps=0):
    ranks = TwoRanks() if ranks is None else ranks
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
        # All ranks compute a step together.
        "model_flops_per_step": 14.0,
    }


def test_step_times_leave_out_warm_up():
    assert gather(warmup_steps=1)["step_s"] == [0.4]


def test_step_count_includes_warm_up():
    assert gather(warmup_steps=1)["optimizer_steps"] == 2


def test_rejects_different_numbers_of_steps():
    with pytest.raises(ValueError, match="different numbers of steps"):
        gather(TwoRanks(other_step_count=1))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_rejects_a_loss_that_is_not_finite(loss):
    steps = StepsTaken(step_s=[0.2, 0.3], loss=loss, model_flops_per_step=7.0)
    with pytest.raises(ValueError, match=f"the loss is {loss}"):
        gather(steps=steps)


# Steps of a host that is faster than its GPU, so that steps queue.

LAUNCH_S = 0.1
"""Seconds in which the simulated host launches a step."""
STEP_S = 0.3
"""Seconds in which the simulated GPU computes a step."""
WARMUP_STEPS = 3
TIMED_STEPS = 10
LOSS = 1.5
STEP_FLOPS = 7.0


class SimulatedGpu:
    """GPU that computes steps one after the other, and a host with a clock."""

    def __init__(self):
        self.host_s = 0.0
        """Time on the host's clock."""
        self._step_ends_s = []
        """Time at which each launched step ends."""
        self.most_in_flight = 0
        """Most steps that were launched and not finished at a time."""

    @property
    def idle_from_s(self):
        """Time from which the GPU has no launched step to compute."""
        return max([self.host_s, *self._step_ends_s])

    def launch_step(self):
        self.host_s += LAUNCH_S
        self._step_ends_s.append(self.idle_from_s + STEP_S)
        unfinished = [end_s for end_s in self._step_ends_s if end_s > self.host_s]
        self.most_in_flight = max(self.most_in_flight, len(unfinished))


class SimulatedEvent:
    """Event that a simulated GPU reaches when it has computed all steps so far."""

    def __init__(self, gpu):
        self._gpu = gpu
        self.reached_s = gpu.idle_from_s

    def wait(self):
        self._gpu.host_s = max(self._gpu.host_s, self.reached_s)

    def seconds_since(self, earlier):
        return self.reached_s - earlier.reached_s


class SimulatedStep:
    """The trainer's step, which a simulated GPU computes.

    It expects a rehearsal first, as DDP and the compiler do.
    """

    def __init__(self, gpu):
        self._gpu = gpu
        self._is_rehearsed = False

    def rehearse(self, _batch):
        self._is_rehearsed = True

    def run(self, _batches, _learning_rate):
        assert self._is_rehearsed
        self._gpu.launch_step()
        return SimpleNamespace(loss=LOSS)


@pytest.fixture
def gpu(monkeypatch):
    """Return a simulated GPU, on which the job trains."""
    gpu = SimulatedGpu()
    training = SimpleNamespace(
        step=SimulatedStep(gpu),
        work=SimpleNamespace(step_flops=lambda _lengths, _predicted: STEP_FLOPS),
    )
    monkeypatch.setattr(step, "mark", lambda _device: SimulatedEvent(gpu))
    monkeypatch.setattr(step, "build_training", lambda *_: training)
    monkeypatch.setattr(step, "make_optimizer_state", lambda _: None)
    monkeypatch.setattr(step, "evaluate_once", lambda *_: None)
    return gpu


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


@pytest.fixture
def steps_taken(gpu, prepared):
    """Return the measurements of steps of one micro-batch on a simulated GPU."""
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
        warmup_steps=WARMUP_STEPS,
        timed_steps=TIMED_STEPS,
        documents_per_sequence=1.0,
    )
    ranks = SimpleNamespace(
        device="cuda", rank=0, world_size=1, all_reduce_sum=lambda _: None
    )
    return step.take_steps(request, ranks)


@pytest.mark.usefixtures("steps_taken")
def test_two_steps_are_in_flight(gpu):
    assert gpu.most_in_flight == step.IN_FLIGHT


def test_queued_step_takes_the_time_of_the_gpu(steps_taken):
    # The first step of all waits for the host to launch it.
    assert len(steps_taken.step_s) == WARMUP_STEPS + TIMED_STEPS
    assert steps_taken.step_s[WARMUP_STEPS:] == pytest.approx([STEP_S] * TIMED_STEPS)


@pytest.mark.usefixtures("steps_taken")
def test_micro_batches_of_few_steps_are_reused(prepared):
    assert len(prepared) == step.PREPARED < WARMUP_STEPS + TIMED_STEPS


def test_steps_report_their_loss(steps_taken):
    assert steps_taken.loss == LOSS


def test_steps_report_their_model_flops(steps_taken):
    assert steps_taken.model_flops_per_step == STEP_FLOPS
