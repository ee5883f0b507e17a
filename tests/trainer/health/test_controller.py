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
from trainer.health import controller
from trainer.health.controller import HealthController, decode_requests, encode_requests
from trainer.health.events import Action

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def summed(*told):
    return [sum(numbers) for numbers in zip(*told, strict=True)]


def said(rank, signal_number=None, *, over=False, save=False):
    return encode_requests(
        rank=rank, signal_number=signal_number, time_is_over=over, save_is_due=save
    )


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([said(0), said(1)], None),
        ([said(0), said(3, signal.SIGUSR1)], "SIGUSR1 on rank 3"),
        ([said(0, signal.SIGTERM)], "SIGTERM on rank 0"),
        ([said(0, signal.SIGTERM, over=True), said(1)], "SIGTERM on rank 0"),
        ([said(rank, signal.SIGUSR2) for rank in range(1024)], "SIGUSR2 on 1024 ranks"),
        ([said(0, signal.SIGTERM), said(1, signal.SIGUSR2)], "signals on 2 ranks"),
        # Not SIGSEGV, in between.
        ([said(0, signal.SIGUSR1), said(1, signal.SIGUSR2)], "signals on 2 ranks"),
    ],
)
def test_signals_are_named_with_their_rank_or_number_and_explain_more_than_the_time(
    told, reason
):
    assert decode_requests(summed(*told)) == (reason, False)


@given(
    st.lists(
        st.tuples(st.none() | st.sampled_from(SIGNALS), st.booleans(), st.booleans()),
        min_size=1,
    )
)
def test_training_stops_and_saves_exactly_when_some_rank_says_so(ranks):
    told = (
        said(rank, number, over=over, save=due)
        for rank, (number, over, due) in enumerate(ranks)
    )
    stop_reason, save_is_due = decode_requests(summed(*told))
    assert (stop_reason is not None) == any(
        number is not None or over for number, over, _ in ranks
    )
    assert save_is_due == any(due for _, _, due in ranks)


QUIET = said(0)


def add(controller, step, *numbers, samples=(1,), told=QUIET, **changes):
    controller.add(step, result_of(*numbers, sums=told, **changes), np.array(samples))


def read_late(monkeypatch):
    """Let numbers be read as late on a CPU as on a GPU."""
    monkeypatch.setitem(
        controller._STEPS_BEHIND, "cpu", controller._STEPS_BEHIND["cuda"]
    )


@pytest.fixture
def events():
    return []


@pytest.fixture
def ranks():
    """The first of two, whose other has samples 90 and 91."""
    gather = Mock(side_effect=lambda own: [own, np.array([91, 90])])
    return Mock(
        rank=0, world_size=2, device=torch.device("cpu"), all_gather_object=gather
    )


@pytest.fixture
def controller_of(events, ranks):
    def make(**health) -> HealthController:
        config = config_of(
            health=HealthSettings(window_steps=16, **health), max_grad_norm=1.0
        )
        return HealthController(config, ranks, events.append)

    return make


@pytest.fixture
def ordinary(controller_of, events, ranks):
    """A function that makes one to which twenty ordinary steps cost no message, and led
    to nothing."""

    def make(**health) -> HealthController:
        controller = controller_of(**health)
        for step in range(1, 21):
            add(controller, step, 2.0 + 0.01 * (step % 5))
            assert controller.check().worst is None
        assert (events, ranks.gather.call_count) == ([], 0)
        return controller

    return make


def test_numbers_are_those_of_the_moment_and_read_once_in_double_precision(
    controller_of, events
):
    controller, result = (
        controller_of(),
        result_of(math.nan, 1 + 2**-50, applied=False, sums=QUIET),
    )
    controller.add(1, result, np.array([1]))
    result.grad_norm.zero_()
    assert controller.check().worst.values["grad_norm"] == 1 + 2**-50
    assert controller.check(wait_for_all=True).worst is None
    assert len(events) == 1


def test_on_a_gpu_numbers_are_read_two_steps_later_and_the_last_ones_when_they_are_asked_for(
    controller_of, monkeypatch
):
    read_late(monkeypatch)
    controller, read = controller_of(on_non_finite="skip"), []
    for step in range(1, 5):
        add(controller, step, math.nan, applied=False)
        read.append(controller.check().at_step)
    assert read == [0, 0, 1, 2]
    assert (controller.check(wait_for_all=True).at_step, controller.skipped_steps) == (
        3,
        4,
    )
    assert controller.check(wait_for_all=True).at_step == 0


def test_an_event_names_the_samples_of_all_ranks_in_that_step(ordinary, events):
    controller = ordinary()
    add(controller, 21, 50.0, samples=[7, 5])
    add(controller, 22, samples=[6])
    verdict = controller.check()
    assert (verdict.worst.action, verdict.at_step, verdict.trouble) == (
        Action.WARN,
        21,
        None,
    )
    (event,) = events
    assert (event.kind, event.action, event.level, event.step) == (
        "spike",
        "warn",
        "warning",
        21,
    )
    assert (event.samples, event.values["loss"]) == ([5, 7, 90, 91], 50.0)
    assert event.causes
    assert event.next_step


def test_the_strongest_of_several_steps_rules(ordinary):
    controller = ordinary(on_spike="rollback", on_non_finite="skip")
    # The first of them.
    for step, loss in ((21, math.nan), (22, 50.0), (23, math.nan), (24, 60.0)):
        add(controller, step, loss, applied=False)
    verdict = controller.check()
    assert (verdict.trouble.action, verdict.at_step) == (Action.ROLL_BACK, 22)
    assert "the loss of step 22 is 50" in verdict.trouble.message
    assert verdict.trouble.next_step


def test_what_ranks_told_is_read_with_the_step(controller_of):
    controller = controller_of()
    for step, told in enumerate(
        (QUIET, said(0, save=True), said(0, signal.SIGTERM)), start=1
    ):
        add(controller, step, told=told)
    verdict = controller.check()
    assert (verdict.worst, verdict.stop_reason, verdict.save_requested_at) == (
        None,
        "SIGTERM on rank 0",
        2,
    )
    add(controller, 4, told=said(0, over=True))
    assert "time limit" in controller.check().stop_reason
