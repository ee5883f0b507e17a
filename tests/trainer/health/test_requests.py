import signal
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.health.requests import decode_requests, encode_requests

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def sum_over_ranks(requests):
    return [sum(numbers) for numbers in zip(*requests, strict=True)]


def request(rank, signal_number=None, *, time_is_over=False, save_is_due=False):
    return encode_requests(
        rank=rank,
        signal_number=signal_number,
        time_is_over=time_is_over,
        save_is_due=save_is_due,
    )


NO_REQUEST = request(0)


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        pytest.param([NO_REQUEST, request(1)], None, id="no signal"),
        pytest.param(
            [NO_REQUEST, request(3, signal.SIGUSR1)],
            "SIGUSR1 on rank 3",
            id="signal on the last of two ranks",
        ),
        pytest.param(
            [request(0, signal.SIGTERM)],
            "SIGTERM on rank 0",
            id="signal on the only rank",
        ),
        pytest.param(
            [request(0, signal.SIGTERM, time_is_over=True), request(1)],
            "SIGTERM on rank 0",
            id="signal takes precedence over the time limit",
        ),
        pytest.param(
            [request(rank, signal.SIGUSR2) for rank in range(1024)],
            "SIGUSR2 on 1024 ranks",
            id="same signal on all ranks",
        ),
        pytest.param(
            [request(0, signal.SIGTERM), request(1, signal.SIGUSR2)],
            "signals on 2 ranks",
            id="different signals",
        ),
        pytest.param(
            [request(0, signal.SIGUSR1), request(1, signal.SIGUSR2)],
            "signals on 2 ranks",
            id="different signals whose mean is SIGSEGV",
        ),
    ],
)
def test_stop_reason_names_signals_and_ranks(requests, reason):
    agreed = decode_requests(sum_over_ranks(requests))
    assert agreed.stop_reason == reason
    assert not agreed.save_is_due


@dataclass(frozen=True)
class RankRequests:
    """Requests of one rank."""

    signal_number: int | None
    time_is_over: bool
    save_is_due: bool


REQUESTS_BY_RANK = st.lists(
    st.builds(
        RankRequests,
        signal_number=st.none() | st.sampled_from(SIGNALS),
        time_is_over=st.booleans(),
        save_is_due=st.booleans(),
    ),
    min_size=1,
)


def agree(requests_by_rank):
    """Return the agreement of ranks on their requests."""
    encoded = [
        encode_requests(rank=rank, **asdict(requests))
        for rank, requests in enumerate(requests_by_rank)
    ]
    return decode_requests(sum_over_ranks(encoded))


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
