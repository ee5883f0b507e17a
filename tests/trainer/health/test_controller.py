import math
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracles import config_of, result_of
from trainer.config.train_config import HealthSettings
from trainer.health import controller as controller_module
from trainer.health.controller import HealthController, decode_requests, encode_requests
from trainer.health.events import Action

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def sum_over_ranks(requests):
    return [sum(numbers) for numbers in zip(*requests, strict=True)]


def request(rank, signal_number=None, *, over=False, save=False):
    return encode_requests(
        rank=rank, signal_number=signal_number, time_is_over=over, save_is_due=save
    )


NO_REQUEST = request(0)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        pytest.param([NO_REQUEST, request(1)], None, id="none"),
        pytest.param(
            [NO_REQUEST, request(3, signal.SIGUSR1)],
            "SIGUSR1 on rank 3",
            id="one rank",
        ),
        pytest.param(
            [request(0, signal.SIGTERM)], "SIGTERM on rank 0", id="single rank"
        ),
        pytest.param(
            [request(0, signal.SIGTERM, over=True), request(1)],
            "SIGTERM on rank 0",
            id="signal and time limit",
        ),
        pytest.param(
            [request(rank, signal.SIGUSR2) for rank in range(1024)],
            "SIGUSR2 on 1024 ranks",
            id="all ranks",
        ),
        pytest.param(
            [request(0, signal.SIGTERM), request(1, signal.SIGUSR2)],
            "signals on 2 ranks",
            id="different signals",
        ),
        pytest.param(
            [request(0, signal.SIGUSR1), request(1, signal.SIGUSR2)],
            "signals on 2 ranks",
            id="different signals with SIGSEGV in between",
        ),
    ],
)
def test_reason_names_signals_and_ranks(requests, reason):
    assert decode_requests(sum_over_ranks(requests)) == (reason, False)


REQUESTS = st.lists(
    st.tuples(st.none() | st.sampled_from(SIGNALS), st.booleans(), st.booleans()),
    min_size=1,
)


@given(requests=REQUESTS)
def test_training_stops_or_saves_if_any_rank_requests_it(requests):
    encoded = [
        request(rank, signal_number, over=over, save=save)
        for rank, (signal_number, over, save) in enumerate(requests)
    ]
    stop_reason, save_is_due = decode_requests(sum_over_ranks(encoded))
    must_stop = any(number is not None or over for number, over, _ in requests)
    assert (stop_reason is not None) == must_stop
    assert save_is_due == any(save for _, _, save in requests)


def add(controller, step, *numbers, samples=(1,), requests=NO_REQUEST, **changes):
    """Add a step of which ``numbers`` are the loss and the gradient norm."""
    result = result_of(*numbers, sums=requests, **changes)
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
def controller_of(events, ranks):
    """Return a function that makes controllers with given settings of health."""

    def make(**health) -> HealthController:
        config = config_of(
            health=HealthSettings(window_steps=16, **health), max_grad_norm=1.0
        )
        return HealthController(config, ranks, events.append)

    return make


@pytest.fixture
def experienced_controller(controller_of):
    """Return a function that makes controllers that have seen 20 ordinary steps."""

    def make(**health) -> HealthController:
        controller = controller_of(**health)
        for step in range(1, 21):
            add(controller, step, 2.0 + 0.01 * (step % 5))
            assert controller.check().worst is None
        return controller

    return make


def test_ordinary_steps_cost_no_message(experienced_controller, events, ranks):
    experienced_controller()
    assert events == []
    assert ranks.all_gather_object.call_count == 0


def test_numbers_are_copied_in_double_precision(controller_of):
    controller = controller_of()
    result = result_of(math.nan, 1 + 2**-50, applied=False, sums=NO_REQUEST)
    controller.add(1, result, np.array([1]))
    result.grad_norm.zero_()  # as the next step does
    assert controller.check().worst.values["grad_norm"] == 1 + 2**-50


def test_step_is_checked_once(controller_of, events):
    controller = controller_of()
    add(controller, 1, math.nan, applied=False)
    assert controller.check().worst is not None
    assert controller.check(wait_for_all=True).worst is None
    assert len(events) == 1


def read_late(monkeypatch):
    """Let numbers be read as late on a CPU as on a GPU."""
    steps_behind = controller_module._STEPS_BEHIND
    monkeypatch.setitem(steps_behind, "cpu", steps_behind["cuda"])


@pytest.fixture
def late_controller(controller_of, monkeypatch):
    """A controller that reads numbers as late as on a GPU.

    It has got four steps that are not finite.
    """
    read_late(monkeypatch)
    controller = controller_of(on_non_finite="skip")
    checked_steps = []
    for step in range(1, 5):
        add(controller, step, math.nan, applied=False)
        checked_steps.append(controller.check().at_step)
    return controller, checked_steps


def test_gpu_numbers_are_read_two_steps_later(late_controller):
    _, checked_steps = late_controller
    assert checked_steps == [0, 0, 1, 2]


def test_last_steps_are_checked_on_request(late_controller):
    controller, _ = late_controller
    assert controller.check(wait_for_all=True).at_step == 3
    assert controller.skipped_steps == 4
    assert controller.check(wait_for_all=True).at_step == 0


def test_event_names_the_samples_of_all_ranks(experienced_controller, events):
    controller = experienced_controller()
    add(controller, 21, 50.0, samples=[7, 5])
    add(controller, 22, samples=[6])
    decision = controller.check()
    assert (decision.worst.action, decision.at_step) == (Action.WARN, 21)
    assert decision.trouble is None
    (event,) = events
    assert (event.kind, event.action, event.level) == ("spike", "warn", "warning")
    assert (event.step, event.samples) == (21, [5, 7, 90, 91])
    assert event.values["loss"] == 50.0
    assert event.causes
    assert event.next_step


def test_first_of_the_strongest_findings_decides(experienced_controller):
    controller = experienced_controller(on_spike="rollback", on_non_finite="skip")
    for step, loss in ((21, math.nan), (22, 50.0), (23, math.nan), (24, 60.0)):
        add(controller, step, loss, applied=False)
    decision = controller.check()
    assert (decision.trouble.action, decision.at_step) == (Action.ROLL_BACK, 22)
    assert "the loss of step 22 is 50" in decision.trouble.message
    assert decision.trouble.next_step


def test_requests_are_read_with_their_step(controller_of):
    controller = controller_of()
    add(controller, 1)
    add(controller, 2, requests=request(0, save=True))
    add(controller, 3, requests=request(0, signal.SIGTERM))
    decision = controller.check()
    assert decision.worst is None
    assert decision.stop_reason == "SIGTERM on rank 0"
    assert decision.save_requested_at == 2


def test_time_limit_is_a_reason_to_stop(controller_of):
    controller = controller_of()
    add(controller, 4, requests=request(0, over=True))
    assert "time limit" in controller.check().stop_reason
