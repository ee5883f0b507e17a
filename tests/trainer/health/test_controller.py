"""Findings, requests and events of a controller, which reads the metrics of steps."""

import math
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.trainer.late_metrics import read_metrics_late
from tests.trainer.step_results import result_of
from tests.trainer.tiny_models import config_of
from trainer.formats.train_config import HealthSettings
from trainer.health.controller import HealthController
from trainer.health.findings import Action
from trainer.health.requests import encode_requests

ORDINARY_LOSS = 2.0
ORDINARY_STEPS = 20
"""Steps that an experienced controller has seen."""
SPIKE_STEP = ORDINARY_STEPS + 1
SPIKE_LOSS = 50.0


def requests_of_rank_0(*, signal_number=None, time_is_over=False, save_is_due=False):
    """Return requests of rank 0, as their sums if no other rank has any."""
    return encode_requests(
        rank=0,
        signal_number=signal_number,
        time_is_over=time_is_over,
        save_is_due=save_is_due,
    )


NO_REQUEST = requests_of_rank_0()


def add_step(
    controller,
    step,
    *,
    loss=ORDINARY_LOSS,
    applied=True,
    samples=(1,),
    requests=NO_REQUEST,
):
    """Add a step with the given metrics to a controller."""
    result = result_of(loss=loss, applied=applied, sums=requests)
    controller.add(step, result, np.array(samples))


@pytest.fixture
def events():
    """Events that a controller has reported."""
    return []


@pytest.fixture
def ranks():
    """The first of two ranks; the other one has samples 90 and 91."""

    def gather_samples(own_samples):
        return [own_samples, np.array([91, 90])]

    return Mock(
        rank=0,
        world_size=2,
        device=torch.device("cpu"),
        all_gather_object=Mock(side_effect=gather_samples),
    )


@pytest.fixture
def make_controller(events, ranks):
    """Return a function that makes controllers with given settings of health."""

    def make(**health) -> HealthController:
        config = config_of(
            health=HealthSettings(window_steps=16, **health), max_grad_norm=1.0
        )
        return HealthController(config, ranks, events.append)

    return make


@pytest.fixture
def make_experienced_controller(make_controller):
    """Return a function that makes controllers that have seen ordinary steps."""

    def make(**health) -> HealthController:
        controller = make_controller(**health)
        for step in range(1, ORDINARY_STEPS + 1):
            # Losses that differ by up to 2 %.
            loss = ORDINARY_LOSS + 0.01 * (step % 5)
            add_step(controller, step, loss=loss)
            assert controller.check().worst is None
        return controller

    return make


def test_ordinary_steps_cost_no_message(make_experienced_controller, events, ranks):
    make_experienced_controller()
    assert events == []
    assert ranks.all_gather_object.call_count == 0


def test_metrics_are_copied_in_double_precision(make_controller):
    controller = make_controller()
    norm = 1 + 2**-50  # not a number of fp32, which would round it
    result = result_of(loss=math.nan, norm=norm, applied=False, sums=NO_REQUEST)
    controller.add(1, result, np.array([1]))
    result.grad_norm.zero_()  # as the next step does
    assert controller.check().worst.values["grad_norm"] == norm


def test_step_is_checked_once(make_controller, events):
    controller = make_controller()
    add_step(controller, 1, loss=math.nan, applied=False)
    assert controller.check().worst is not None
    assert controller.check(wait_for_all=True).worst is None
    assert len(events) == 1


@pytest.fixture
def late_controller(make_controller, monkeypatch):
    """A controller that reads metrics as late on a CPU as on a GPU."""
    read_metrics_late(monkeypatch)
    return make_controller(on_non_finite="skip")


def add_non_finite_steps(controller):
    """Add steps 1 to 4, and return the step that was checked after each, or 0."""
    checked_steps = []
    for step in range(1, 5):
        add_step(controller, step, loss=math.nan, applied=False)
        checked_steps.append(controller.check().at_step)
    return checked_steps


def test_gpu_metrics_are_read_two_steps_later(late_controller):
    assert add_non_finite_steps(late_controller) == [0, 0, 1, 2]


def test_last_steps_are_checked_on_request(late_controller):
    add_non_finite_steps(late_controller)
    # The first of the steps 3 and 4, whose findings are equally strong.
    assert late_controller.check(wait_for_all=True).at_step == 3
    assert late_controller.check(wait_for_all=True).at_step == 0


def test_skipped_steps_are_counted(late_controller):
    add_non_finite_steps(late_controller)
    late_controller.check(wait_for_all=True)
    assert late_controller.skipped_steps == 4


@pytest.fixture
def controller_with_spike(make_experienced_controller):
    """A controller after a spike, of samples 5 and 7, and an ordinary step."""
    controller = make_experienced_controller()
    add_step(controller, SPIKE_STEP, loss=SPIKE_LOSS, samples=[7, 5])
    add_step(controller, SPIKE_STEP + 1, samples=[6])
    return controller


def test_spike_is_a_warning_without_consequence(controller_with_spike):
    decision = controller_with_spike.check()
    assert (decision.worst.action, decision.at_step) == (Action.WARN, SPIKE_STEP)
    assert decision.trouble is None


def test_spike_is_reported_with_its_loss(controller_with_spike, events):
    controller_with_spike.check()
    (event,) = events
    assert (event.kind, event.action, event.level) == ("spike", "warn", "warning")
    assert event.values["loss"] == SPIKE_LOSS


def test_spike_is_reported_with_advice(controller_with_spike, events):
    controller_with_spike.check()
    (event,) = events
    assert event.causes
    assert event.next_step


def test_event_names_the_samples_of_all_ranks(controller_with_spike, events):
    controller_with_spike.check()
    (event,) = events
    assert event.step == SPIKE_STEP
    # Those of this rank, and those of the other one; see ``ranks``.
    assert event.samples == [5, 7, 90, 91]


def test_first_of_the_strongest_findings_decides(make_experienced_controller):
    controller = make_experienced_controller(on_spike="rollback", on_non_finite="skip")
    # A loss that is not finite is only skipped, and a spike is undone.
    losses = [math.nan, SPIKE_LOSS, math.nan, SPIKE_LOSS + 10]
    for step, loss in enumerate(losses, start=ORDINARY_STEPS + 1):
        add_step(controller, step, loss=loss, applied=False)
    decision = controller.check()
    first_spike_step = ORDINARY_STEPS + 2
    assert decision.trouble.action is Action.ROLL_BACK
    assert decision.at_step == first_spike_step
    assert f"the loss of step {first_spike_step} is 50" in decision.trouble.message
    assert decision.trouble.next_step


def test_requests_are_read_with_their_step(make_controller):
    controller = make_controller()
    save_request = requests_of_rank_0(save_is_due=True)
    exit_request = requests_of_rank_0(signal_number=signal.SIGTERM)
    add_step(controller, 1)
    add_step(controller, 2, requests=save_request)
    add_step(controller, 3, requests=exit_request)
    decision = controller.check()
    assert decision.worst is None
    assert decision.stop_reason == "SIGTERM on rank 0"
    assert decision.save_requested_at == 2


def test_time_limit_is_a_reason_to_stop(make_controller):
    controller = make_controller()
    add_step(controller, 4, requests=requests_of_rank_0(time_is_over=True))
    assert "time limit" in controller.check().stop_reason
