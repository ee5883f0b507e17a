"""Steps of the ``step`` job in flight, on a simulated GPU.

The host is faster than the GPU, so that steps queue.
"""

from types import SimpleNamespace

import pytest
import torch

from autotune.memory.jobs import step
from autotune.memory.values import StepRequest
from trainer.config.presets import model_settings
from trainer.config.train_config import TrainConfig

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
        self.max_in_flight = 0
        """Highest number of steps that were launched and not finished at a time."""

    @property
    def idle_from_s(self):
        """Time from which the GPU has no launched step to compute."""
        return max([self.host_s, *self._step_ends_s])

    def launch_step(self):
        self.host_s += LAUNCH_S
        self._step_ends_s.append(self.idle_from_s + STEP_S)
        unfinished = [end_s for end_s in self._step_ends_s if end_s > self.host_s]
        self.max_in_flight = max(self.max_in_flight, len(unfinished))


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

    It must be rehearsed before it is run, as DDP and the compiler require.
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
def prepared_batches(monkeypatch):
    """Return the list of the micro-batches that the job makes, of one token each."""
    batches = []

    def make_batch(*_, **__):
        batch = SimpleNamespace(tokens_N=torch.ones(1), predicted_tokens=3)
        batches.append(batch)
        return batch

    monkeypatch.setattr(step, "fullest_batch", make_batch)
    return batches


@pytest.fixture
def steps_taken(gpu, prepared_batches):
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
    assert gpu.max_in_flight == step.QUEUED_STEPS


def test_queued_step_takes_the_time_of_the_gpu(steps_taken):
    assert len(steps_taken.step_s) == WARMUP_STEPS + TIMED_STEPS
    # Only the first step, of the warm-up, also waits until the host has launched it.
    assert steps_taken.step_s[WARMUP_STEPS:] == pytest.approx([STEP_S] * TIMED_STEPS)


@pytest.mark.usefixtures("steps_taken")
def test_micro_batches_of_few_steps_are_reused(prepared_batches):
    assert len(prepared_batches) == step.PREPARED_STEPS < WARMUP_STEPS + TIMED_STEPS


def test_steps_report_their_loss(steps_taken):
    assert steps_taken.loss == LOSS


def test_steps_report_their_model_flops(steps_taken):
    assert steps_taken.model_flops_per_step == STEP_FLOPS
