"""Time and memory of optimizer steps: small models on a CPU, and a simulated GPU."""

import ctypes
import gc

import pytest
import torch

from autotune.memory.jobs import step_meter
from autotune.memory.jobs.step_meter import MOST_CALLS, QUEUED_STEPS, StepMeter
from autotune.subjects.subject import StepFacts
from autotune.trials.jobs.budget import enforce
from trainer.formats.errors import BadConfig

CPU = torch.device("cpu")
WARMUP_STEPS = 2
TIMED_STEPS = 3
STEPS = WARMUP_STEPS + TIMED_STEPS
MIB = 2**20


def meter_of(warmup_steps=WARMUP_STEPS, timed_steps=TIMED_STEPS) -> StepMeter:
    """Return a meter on the CPU, without a memory limit."""
    return StepMeter(
        enforce(None, CPU, None),
        CPU,
        warmup_steps=warmup_steps,
        timed_steps=timed_steps,
    )


@pytest.fixture
def meter():
    """Return a meter that watches the optimizers of this process.

    What earlier tests left is freed first: it would lower the resident memory later.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    meter = meter_of()
    end_watch = meter.watch()
    yield meter
    end_watch()


class Training:
    """A linear layer and its optimizer.

    Args:
        accumulated: Calls of ``step`` for each optimizer step.
    """

    def __init__(self, accumulated=1):
        self._layer = torch.nn.Linear(64, 64)
        self._optimizer = torch.optim.AdamW(self._layer.parameters())
        self._accumulated = accumulated
        self.calls = 0

    def step(self):
        self.calls += 1
        self._layer(torch.ones(8, 64)).sum().backward()
        if self.calls % self._accumulated == 0:
            self._optimizer.step()
            self._optimizer.zero_grad()


def take_with_facts(meter, *, accumulated=1):
    """Take all steps of a training; return the calls of its facts in their order."""
    training, calls = Training(accumulated), []

    def step():
        calls.append("step")
        training.step()

    meter.facts = StepFacts(
        prepare=lambda: calls.append("prepare"),
        begin_together=lambda: calls.append("begin"),
        evaluate=lambda: calls.append("evaluate"),
    )
    meter.take(step)
    return calls


def test_takes_warm_up_and_timed_steps(meter):
    training = Training()
    meter.take(training.step)
    assert training.calls == meter.steps == meter.optimizer_steps == STEPS
    assert meter.calls_by_step == [1] * STEPS
    assert len(meter.peak_bytes) == len(meter.kept_bytes) == STEPS
    assert all(step_s > 0 for step_s in meter.step_s())
    assert not meter.trains


def test_step_without_optimizer_is_one_call(meter):
    calls = []
    meter.take(lambda: calls.append(0))
    assert len(calls) == meter.steps == STEPS
    assert meter.optimizer_steps == meter.gradient_bytes == 0


def test_accumulated_calls_are_one_step(meter):
    meter.take(Training(accumulated=4).step)
    assert meter.steps == meter.optimizer_steps == STEPS
    assert meter.calls_by_step == [4] * STEPS


def test_time_of_step_is_that_of_all_calls(meter, clock):
    def seconds_each():
        training = Training(accumulated=4)

        def step():
            clock.host_s += 1.0
            training.step()

        return step

    meter.take(seconds_each())
    assert meter.step_s() == [4.0] * STEPS


def test_endless_accumulation_is_an_error(meter):
    training = Training(accumulated=10**6)
    with pytest.raises(BadConfig, match=f"no optimizer step in {MOST_CALLS} calls"):
        meter.take(training.step)
    assert training.calls == MOST_CALLS


def test_optimizers_of_one_call_are_one_step(meter):
    generator, discriminator = Training(), Training()

    def step():
        for _ in range(3):
            discriminator.step()
        generator.step()

    meter.take(step)
    assert generator.calls == meter.steps == STEPS
    assert meter.calls_by_step == [1] * STEPS
    # Those of the optimizer that stepped first.
    assert meter.optimizer_steps == discriminator.calls == 3 * STEPS


def test_late_optimizer_is_waited_for(meter):
    often, seldom = Training(), Training(accumulated=10)

    def step():
        often.step()
        seldom.step()

    meter.take(step)
    # The second one has stepped twice: its state is in memory by the last step.
    assert seldom.calls >= 20


def test_loop_ends_after_its_steps(meter):
    training, caught = Training(), []

    def loop():
        while True:
            try:
                training.step()
            except Exception as error:  # noqa: BLE001 - as a loop that never gives up
                caught.append(error)

    meter.restart(loop_steps=STEPS)
    with pytest.raises(step_meter.EnoughSteps):
        loop()
    assert meter.trains
    assert training.calls == meter.steps == STEPS
    assert caught == []


def test_several_steps_of_a_call_are_no_loop(meter):
    training = Training()

    def step():
        for _ in range(STEPS):
            training.step()

    meter.restart(loop_steps=2 * STEPS)
    meter.take(step)
    assert not meter.trains
    assert meter.steps == STEPS
    assert training.calls == meter.optimizer_steps == STEPS**2


def test_gradients_are_counted(meter):
    meter.take(Training().step)
    # Of a weight and a bias in fp32.
    assert meter.gradient_bytes == 4 * (64 * 64 + 64)


def test_memory_that_a_step_keeps_grows(meter):
    held = []
    # Blocks of over 32 MiB never lie in memory that earlier tests left to malloc.
    meter.take(lambda: held.append(torch.ones(16 * MIB)))
    growth_bytes = meter.kept_bytes[-1] - meter.kept_bytes[0]
    assert growth_bytes == pytest.approx((STEPS - 1) * 64 * MIB, rel=0.05)


def test_peak_is_that_of_its_own_step(meter):
    sizes = iter([1, 16, 1, 1, 1])
    meter.take(lambda: torch.ones(next(sizes) * MIB).sum())
    low, high, *others = meter.peak_bytes
    assert high - low == pytest.approx(60 * MIB, rel=0.1)
    assert max(others) < low + 30 * MIB


def test_watch_ends(meter):
    end_watch = meter.watch()
    end_watch()
    other = meter_of()
    make = torch.optim.Optimizer.__init__
    end_other = other.watch()
    assert torch.optim.Optimizer.__init__ is not make
    end_other()
    assert torch.optim.Optimizer.__init__ is make
    Training().step()
    assert other.optimizer_steps == 0
    assert len(other.optimizers) == 0


def test_evaluates_after_warm_up_and_last_step(meter):
    calls = take_with_facts(meter)
    assert [call for call in calls if call != "begin"] == [
        "prepare",
        *["step"] * WARMUP_STEPS,
        "evaluate",
        *["step"] * TIMED_STEPS,
        "evaluate",
    ]


def test_ranks_begin_each_optimizer_step_together(meter):
    calls = take_with_facts(meter, accumulated=2)
    assert [call for call in calls if call != "evaluate"] == [
        "prepare",
        *["begin", "step", "step"] * STEPS,
    ]


def test_facts_take_no_time_of_steps(meter, clock):
    def pass_time():
        clock.host_s += 100.0

    def step():
        clock.host_s += 1.0

    meter.facts = StepFacts(
        prepare=pass_time, begin_together=pass_time, evaluate=pass_time
    )
    meter.take(step)
    assert meter.step_s() == [1.0] * STEPS


def test_steps_of_preparation_do_not_count(meter):
    training = Training()
    meter.facts = StepFacts(prepare=training.step)
    meter.take(training.step)
    assert meter.steps == meter.optimizer_steps == STEPS
    assert training.calls == STEPS + 1


LAUNCH_S = 0.1
"""Seconds in which the simulated host launches a step."""
STEP_S = 0.3
"""Seconds in which the simulated GPU computes a step."""


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


@pytest.fixture
def gpu(monkeypatch):
    """Return a simulated GPU, whose clock the meter reads."""
    gpu = SimulatedGpu()
    monkeypatch.setattr(step_meter, "mark", lambda _device: SimulatedEvent(gpu))
    return gpu


@pytest.fixture
def clock(gpu, meter):
    """Return a simulated host, whose steps take the time that they add to its clock."""
    meter.restart(loop_steps=STEPS)
    return gpu


def test_two_steps_are_in_flight(gpu):
    """The host is faster than the GPU, so that steps queue."""
    meter_of(timed_steps=10).take(gpu.launch_step)
    assert gpu.max_in_flight == QUEUED_STEPS


def test_queued_step_takes_the_time_of_the_gpu(gpu):
    meter = meter_of(timed_steps=10)
    meter.take(gpu.launch_step)
    # Only the first step, of the warm-up, also waits until the host has launched it.
    assert meter.step_s()[WARMUP_STEPS:] == pytest.approx([STEP_S] * 10)
