import signal
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.health.requests import AgreedRequests, decode_requests, encode_requests

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class RankRequests:
    """Requests of one rank."""

    signal_number: int | None = None
    time_is_over: bool = False
    save_is_due: bool = False


NO_REQUEST = RankRequests()


def agree(requests_by_rank: list[RankRequests]) -> AgreedRequests:
    """Return the agreement of ranks on their requests."""
    encoded = [
        encode_requests(
            rank=rank,
            signal_number=requests.signal_number,
            time_is_over=requests.time_is_over,
            save_is_due=requests.save_is_due,
        )
        for rank, requests in enumerate(requests_by_rank)
    ]
    return decode_requests([sum(numbers) for numbers in zip(*encoded, strict=True)])


@pytest.mark.parametrize(
    ("requests_by_rank", "reason"),
    [
        pytest.param([NO_REQUEST, NO_REQUEST], None, id="no signal"),
        pytest.param(
            [*[NO_REQUEST] * 3, RankRequests(signal_number=signal.SIGUSR1)],
            "SIGUSR1 on rank 3",
            id="signal on the last of four ranks",
        ),
        pytest.param(
            [RankRequests(signal_number=signal.SIGTERM)],
            "SIGTERM on rank 0",
            id="signal on the only rank",
        ),
        pytest.param(
            [
                RankRequests(signal_number=signal.SIGTERM, time_is_over=True),
                NO_REQUEST,
            ],
            "SIGTERM on rank 0",
            id="signal takes precedence over the time limit",
        ),
        pytest.param(
            [RankRequests(signal_number=signal.SIGUSR2)] * 1024,
            "SIGUSR2 on 1024 ranks",
            id="same signal on all ranks",
        ),
        pytest.param(
            [
                RankRequests(signal_number=signal.SIGTERM),
                RankRequests(signal_number=signal.SIGUSR2),
            ],
            "signals on 2 ranks",
            id="different signals",
        ),
        pytest.param(
            [
                RankRequests(signal_number=signal.SIGUSR1),
                RankRequests(signal_number=signal.SIGUSR2),
            ],
            "signals on 2 ranks",
            id="different signals whose mean is SIGSEGV",
        ),
    ],
)
def test_stop_reason_names_signals_and_ranks(requests_by_rank, reason):
    agreed = agree(requests_by_rank)
    assert agreed.stop_reason == reason
    assert not agreed.save_is_due


REQUESTS_BY_RANK = st.lists(
    st.builds(
        RankRequests,
        signal_number=st.none() | st.sampled_from(SIGNALS),
        time_is_over=st.booleans(),
        save_is_due=st.booleans(),
    ),
    min_size=1,
)
"""Requests of one or more ranks."""


@given(requests_by_rank=REQUESTS_BY_RANK)
def test_training_stops_if_any_rank_requests_it(requests_by_rank):
    must_stop = any(
        requests.signal_number is not None or requests.time_is_over
        for requests in requests_by_rank
    )
    assert (agree(requests_by_rank).stop_reason is not None) == must_stop


@given(requests_by_rank=REQUESTS_BY_RANK)
def test_training_saves_if_any_rank_requests_it(requests_by_rank):
    must_save = any(requests.save_is_due for requests in requests_by_rank)
    assert agree(requests_by_rank).save_is_due == must_save
