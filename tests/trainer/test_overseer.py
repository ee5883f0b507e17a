import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracles import config_of
from trainer.config import HealthSettings
from trainer.events import Action
from trainer.overseer import Agreed, Overseer, VitalsQueue, agreed, tell
from trainer.step import StepResult
from trainer.stopwatch import Mark

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def summed(*told):
    return [sum(numbers) for numbers in zip(*told, strict=True)]


def calm(rank):
    return tell(rank=rank, signal_number=None, time_is_over=False, save_is_due=False)


def signalled(rank, number):
    return tell(rank=rank, signal_number=number, time_is_over=False, save_is_due=False)


def test_nothing_is_agreed_on_while_nobody_says_anything():
    assert agreed(summed(calm(0), calm(1))) == Agreed(stop_reason=None, save_is_due=False)


def test_a_signal_on_one_rank_is_named_with_the_rank():
    assert agreed(summed(calm(0), signalled(3, signal.SIGUSR1))).stop_reason == "SIGUSR1 on rank 3"
    assert agreed(signalled(0, signal.SIGTERM)).stop_reason == "SIGTERM on rank 0"


def test_the_same_signal_on_many_ranks_is_named_with_their_number():
    told = summed(*(signalled(rank, signal.SIGTERM) for rank in range(5)))
    assert agreed(told).stop_reason == "SIGTERM on 5 ranks"


def test_different_signals_stop_training_too():
    told = summed(signalled(0, signal.SIGTERM), signalled(1, signal.SIGUSR2))
    assert agreed(told).stop_reason == "signals on 2 ranks"


def test_time_and_saves_are_the_first_ranks_word():
    told = tell(rank=0, signal_number=None, time_is_over=True, save_is_due=True)
    both = agreed(summed(told, calm(1)))
    assert both.save_is_due
    assert "train.stop_after_s" in both.stop_reason


def test_a_signal_explains_more_than_the_time():
    told = tell(rank=0, signal_number=signal.SIGTERM, time_is_over=True, save_is_due=False)
    assert agreed(told).stop_reason == "SIGTERM on rank 0"


@given(st.lists(st.tuples(st.none() | st.sampled_from(SIGNALS), st.booleans(), st.booleans()), min_size=1))
def test_training_stops_and_saves_exactly_when_some_rank_says_so(ranks):
    told = summed(
        *(
            tell(rank=rank, signal_number=number, time_is_over=over, save_is_due=due)
            for rank, (number, over, due) in enumerate(ranks)
        )
    )
    found = agreed(told)
    assert (found.stop_reason is not None) == any(number is not None or over for number, over, _ in ranks)
    assert found.save_is_due == any(due for _, _, due in ranks)


@pytest.mark.parametrize("world", [2, 1024])
def test_sums_over_many_ranks_stay_exact(world):
    told = summed(*(signalled(rank, signal.SIGUSR2) for rank in range(world)))
    assert agreed(told).stop_reason == f"SIGUSR2 on {world} ranks"


def test_two_signals_are_not_taken_for_a_third():
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    told = [
        tell(rank=rank, signal_number=number, time_is_over=False, save_is_due=False)
        for rank, number in enumerate(numbers)
    ]
    assert agreed([sum(one) for one in zip(*told, strict=True)]).stop_reason == "signals on 2 ranks"


NOW = Mark(0.0)


def result_of(loss=2.0, norm=1.0, applied=True, told=()):
    return StepResult(
        loss=torch.tensor(loss, dtype=torch.float64), grad_norm=torch.tensor(norm), applied=torch.tensor(applied),
        told=torch.tensor(told, dtype=torch.float64), partial=None, began=NOW, asked=NOW, counted=NOW, departed=None,
        reduced=NOW, updated=NOW,
    )  # fmt: skip


def test_on_a_cpu_every_step_has_arrived_in_order_and_once():
    queue = VitalsQueue(torch.device("cpu"))
    queue.add(1, result_of(2.0, told=(1.0, 15.0)))
    queue.add(2, result_of(math.nan, math.inf, applied=False))
    first, second = queue.arrived()
    assert (first.vitals.step, first.vitals.loss, first.vitals.applied, first.told) == (1, 2.0, True, [1.0, 15.0])
    assert math.isnan(second.vitals.loss)
    assert (second.vitals.grad_norm, second.vitals.applied, second.told) == (math.inf, False, [])
    assert list(queue.arrived(all_of_them=True)) == []


def test_numbers_are_those_of_the_moment_and_in_double_precision():
    queue, result = VitalsQueue(torch.device("cpu")), result_of(1 + 2**-50)
    queue.add(1, result)
    result.loss.zero_()
    (one,) = queue.arrived()
    assert one.vitals.loss == 1 + 2**-50


def read_late(monkeypatch):
    """Let numbers be read as late on a CPU as on a GPU."""
    begin = VitalsQueue.__init__

    def begin_as_on_a_gpu(queue, _):
        begin(queue, SimpleNamespace(type="cuda"))

    monkeypatch.setattr(VitalsQueue, "__init__", begin_as_on_a_gpu)
    monkeypatch.setattr("trainer.overseer.mark", lambda _: NOW)


def test_on_a_gpu_numbers_are_read_two_steps_later_and_the_last_ones_when_they_are_asked_for(monkeypatch):
    read_late(monkeypatch)
    queue, read = VitalsQueue(torch.device("cpu")), []
    for step in range(1, 5):
        queue.add(step, result_of(float(step)))
        read.append([one.vitals.step for one in queue.arrived()])
    assert read == [[], [], [1], [2]]
    assert [(one.vitals.step, one.vitals.loss) for one in queue.arrived(all_of_them=True)] == [(3, 3.0), (4, 4.0)]
    assert list(queue.arrived(all_of_them=True)) == []


def test_steps_that_are_undone_are_not_read():
    queue = VitalsQueue(torch.device("cpu"))
    queue.add(1, result_of())
    queue.forget()
    queue.add(1, result_of(3.0))
    assert [one.vitals.loss for one in queue.arrived()] == [3.0]


class _Ranks:
    """The first of two, whose other has samples 90 and 91."""

    rank, device = 0, torch.device("cpu")

    def __init__(self) -> None:
        self.gathered = 0

    def gather(self, numbers):
        self.gathered += 1
        return [numbers, np.array([91, 90])]


QUIET = [0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.fixture
def events():
    return []


@pytest.fixture
def ranks():
    return _Ranks()


@pytest.fixture
def overseer_of(events, ranks):
    def make(**health) -> Overseer:
        config = config_of(health=HealthSettings(window_steps=16, **health), max_grad_norm=1.0)
        return Overseer(config, ranks, events.append)

    return make


def ordinary(overseer, steps=20, begin=1):
    """Steps of which nothing is to be said."""
    for step in range(begin, begin + steps):
        overseer.add(step, result_of(2.0 + 0.01 * (step % 5), told=QUIET), np.array([step]))
        assert overseer.look().action is None


def test_an_ordinary_step_costs_no_message_and_leads_to_nothing(overseer_of, events, ranks):
    ordinary(overseer_of())
    assert (events, ranks.gathered) == ([], 0)


def test_an_event_names_the_samples_of_all_ranks_in_that_step(overseer_of, events):
    overseer = overseer_of()
    ordinary(overseer)
    overseer.add(21, result_of(50.0, told=QUIET), np.array([7, 5]))
    overseer.add(22, result_of(2.0, told=QUIET), np.array([6]))
    verdict = overseer.look()
    assert (verdict.action, verdict.at_step) == (Action.WARN, 21)
    (event,) = events
    assert (event.kind, event.action, event.level, event.step) == ("spike", "warn", "warning", 21)
    assert event.samples == [5, 7, 90, 91]
    assert event.values["loss"] == 50.0
    assert event.causes
    assert event.next_step


def test_values_that_are_none_become_text_and_their_steps_are_counted(overseer_of, events):
    overseer = overseer_of()
    overseer.add(1, result_of(math.nan, math.inf, applied=False, told=QUIET), np.array([1]))
    assert overseer.look().action is Action.SKIP
    assert overseer.skipped_steps == 1
    assert events[0].values == {"loss": "nan", "grad_norm": "inf"}


def test_the_strongest_of_several_steps_rules(overseer_of):
    overseer = overseer_of(on_spike="rollback", on_non_finite="skip")
    ordinary(overseer)
    for step, loss in ((21, math.nan), (22, 50.0), (23, math.nan)):
        overseer.add(step, result_of(loss, applied=False, told=QUIET), np.array([step]))
    verdict = overseer.look()
    assert (verdict.action, verdict.at_step) == (Action.ROLL_BACK, 22)
    assert "the loss of step 22 is 50" in verdict.message
    assert verdict.next_step


def test_what_ranks_told_is_read_with_the_step(overseer_of):
    overseer = overseer_of()
    told = tell(rank=0, signal_number=signal.SIGTERM, time_is_over=False, save_is_due=False)
    overseer.add(1, result_of(told=QUIET), np.array([1]))
    overseer.add(2, result_of(told=[0.0, 0.0, 0.0, 0.0, 1.0]), np.array([2]))
    overseer.add(3, result_of(told=told), np.array([3]))
    verdict = overseer.look()
    assert (verdict.action, verdict.stop_reason, verdict.save_asked_at) == (None, "SIGTERM on rank 0", 2)
    overseer.add(4, result_of(told=[0.0, 0.0, 0.0, 1.0, 0.0]), np.array([4]))
    assert "is nearly over" in overseer.look().stop_reason


def test_limits_are_those_of_the_policies(overseer_of):
    for policy, limited in (("warn", False), ("skip", True), ("rollback", True)):
        overseer = overseer_of(on_spike=policy)
        assert math.isinf(overseer.health.limits().loss)
        ordinary(overseer)
        assert math.isfinite(overseer.health.limits().loss) == limited
        assert math.isinf(overseer.health.limits().grad_norm)


def test_a_rollback_forgets_the_steps_that_are_undone(overseer_of, events):
    overseer = overseer_of(on_spike="rollback")
    ordinary(overseer)
    saved = overseer.health.to_json()
    overseer.add(21, result_of(50.0, applied=False, told=QUIET), np.array([1]))
    verdict = overseer.look()
    overseer.add(22, result_of(60.0, applied=False, told=QUIET), np.array([2]))
    overseer.roll_back(saved, at_step=verdict.at_step, to_step=20)
    assert overseer.look(all_of_them=True).action is None
    assert len(events) == 1
    assert overseer.health.rollbacks == 1
    assert overseer.health.learning_rate_share(20) == 0.5


def test_what_a_checkpoint_remembers_is_taken_up(overseer_of):
    first, second = overseer_of(on_spike="skip"), overseer_of(on_spike="skip")
    ordinary(first)
    second.go_on(first.health.to_json(), skipped_steps=3)
    assert second.health.limits() == first.health.limits()
    assert second.skipped_steps == 3
