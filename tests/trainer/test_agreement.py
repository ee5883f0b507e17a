import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.overseer import Agreed, agreed, tell

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
