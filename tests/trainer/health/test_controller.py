import math
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.trainer.oracles import config_of, result_of
from trainer.config.train_config import HealthSettings
from trainer.health import controller as controller_module
from trainer.health.controller import HealthController
from trainer.health.events import Action
from trainer.health.requests import encode_requests


def request(*, signal_number=None, time_is_over=False, save_is_due=False):
    """Return requests of rank 0, as their sums if no other rank has any."""
    return encode_requests(
        rank=0,
        signal_number=signal_number,
        time_is_over=time_is_over,
        save_is_due=save_is_due,
    )


NO_REQUEST = request()


def add(controller, step, loss=2.0, *, applied=True, samples=(1,), requests=NO_REQUEST):
    """Add a step with the given numbers to a controller."""
    result = result_of(loss, applied=applied, sums=requests)
    controller.add(step, result, np.array(samples))


@pytest.fixture
def events():
    """Events that a controller has reported."""
    return []


@pytest.fixture
def ranks():
    """The first of two ranks; the other one has samples 90 and 91."""
    gather = Mock(side_effect=lambda own: [own, np.array([91, 90])])
    return Mock(
        rank=0, world_size=2, device=torch.device("cpu"), all_gather_object=gather
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
    """Return a function that makes controllers that have seen 20 ordinary steps."""

    def make(**health) -> HealthController:
        controller = make_controller(**health)
        for step in range(1, 21):
            add(controller, step, 2.0 + 0.01 * (step % 5))
            assert controller.check().worst is None
        return controller

    return make


def test_ordinary_steps_cost_no_message(make_experienced_controller, events, ranks):
    make_experienced_controller()
    assert events == []
    assert ranks.all_gather_object.call_count == 0


def test_numbers_are_copied_in_double_precision(make_controller):
    controller = make_controller()
    result = result_of(math.nan, 1 + 2**-50, applied=False, sums=NO_REQUEST)
    controller.add(1, result, np.array([1]))
    result.grad_norm.zero_()  # as the next step does
    assert controller.check().worst.values["grad_norm"] == 1 + 2**-50


def test_step_is_checked_once(make_controller, events):
    controller = make_controller()
    add(controller, 1, math.nan, applied=False)
    assert controller.check().worst is not None
    assert controller.check(wait_for_all=True).worst is None
    assert len(events) == 1


@pytest.fixture
def late_controller(make_controller, monkeypatch):
    """A controller that reads numbers as late on a CPU as on a GPU."""
    steps_behind = controller_module._STEPS_BEHIND
    monkeypatch.setitem(steps_behind, "cpu", steps_behind["cuda"])
    return make_controller(on_non_finite="skip")


def add_non_finite_steps(controller):
    """Add steps 1 to 4, and return the step that was checked after each, or 0."""
    checked_steps = []
    for step in range(1, 5):
        add(controller, step, math.nan, applied=False)
        checked_steps.append(controller.check().at_step)
    return checked_steps


def test_gpu_numbers_are_read_two_steps_later(late_controller):
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
    """A controller whose step 21 of samples 5 and 7 has a loss of 50, unlike 22."""
    controller = make_experienced_controller()
    add(controller, 21, 50.0, samples=[7, 5])
    add(controller, 22, samples=[6])
    return controller


def test_spike_is_a_warning_without_consequence(controller_with_spike):
    decision = controller_with_spike.check()
    assert (decision.worst.action, decision.at_step) == (Action.WARN, 21)
    assert decision.trouble is None


def test_spike_is_reported_with_its_loss(controller_with_spike, events):
    controller_with_spike.check()
    (event,) = events
    assert (event.kind, event.action, event.level) == ("spike", "warn", "warning")
    assert event.values["loss"] == 50.0


def test_spike_is_reported_with_advice(controller_with_spike, events):
    controller_with_spike.check()
    (event,) = events
    assert event.causes
    assert event.next_step


def test_event_names_the_samples_of_all_ranks(controller_with_spike, events):
    controller_with_spike.check()
    (event,) = events
    assert event.step == 21
    # Those of this rank, and those of the other one; see ``ranks``.
    assert event.samples == [5, 7, 90, 91]


def test_first_of_the_strongest_findings_decides(make_experienced_controller):
    controller = make_experienced_controller(on_spike="rollback", on_non_finite="skip")
    for step, loss in ((21, math.nan), (22, 50.0), (23, math.nan), (24, 60.0)):
        add(controller, step, loss, applied=False)
    decision = controller.check()
    assert (decision.trouble.action, decision.at_step) == (Action.ROLL_BACK, 22)
    assert "the loss of step 22 is 50" in decision.trouble.message
    assert decision.trouble.next_step


def test_requests_are_read_with_their_step(make_controller):
    controller = make_controller()
    add(controller, 1)
    add(controller, 2, requests=request(save_is_due=True))
    add(controller, 3, requests=request(signal_number=signal.SIGTERM))
    decision = controller.check()
    assert decision.worst is None
    assert decision.stop_reason == "SIGTERM on rank 0"
    assert decision.save_requested_at == 2


def test_time_limit_is_a_reason_to_stop(make_controller):
    controller = make_controller()
    add(controller, 4, requests=request(time_is_over=True))
    assert "time limit" in controller.check().stop_reason
