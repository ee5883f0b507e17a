"""Requests of ranks to stop or save, on which all ranks agree. Pure, no torch here.

They are summed in the same all-reduce as the number of tokens, which every step needs
anyway.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.health.signals import SIGNALS


class RequestSums(NamedTuple):
    """Requests of a rank, or their sums over ranks, in the order of the all-reduce.

    A signal is described by three sums, from which ``decode_requests`` finds its name
    and its rank.
    """

    signalled_ranks: float
    """Number of ranks that received a signal."""
    rank_sum: float
    """Sum of the ranks that received a signal."""
    signal_sum: float
    """Sum of the numbers of the signals."""
    ranks_out_of_time: float
    """Number of ranks whose time limit is near."""
    ranks_with_save_due: float
    """Number of ranks on whose clock a save is due."""


def encode_requests(
    *, rank: int, signal_number: int | None, time_is_over: bool, save_is_due: bool
) -> RequestSums:
    """Return a rank's requests as numbers to be summed over ranks."""
    requests = RequestSums(
        signalled_ranks=0.0,
        rank_sum=0.0,
        signal_sum=0.0,
        ranks_out_of_time=float(time_is_over),
        ranks_with_save_due=float(save_is_due),
    )
    if signal_number is None:
        return requests
    return requests._replace(
        signalled_ranks=1.0, rank_sum=float(rank), signal_sum=float(signal_number)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedRequests:
    """Requests of all ranks at one step."""

    stop_reason: str | None
    """Reason to save and exit, if any."""
    save_is_due: bool


def decode_requests(sums: Sequence[float]) -> AgreedRequests:
    """Decode ``RequestSums`` that are summed over all ranks."""
    requests = RequestSums._make(map(round, sums))
    stop_reason = None
    if requests.signalled_ranks:
        stop_reason = _describe_signals(requests)
    elif requests.ranks_out_of_time:
        stop_reason = "the time limit (train.stop_after_s, or the SLURM job's) is near"
    return AgreedRequests(
        stop_reason=stop_reason, save_is_due=bool(requests.ranks_with_save_due)
    )


def _describe_signals(requests: RequestSums) -> str:
    """Return the name of the signal, and the rank or number of ranks it reached."""
    # The mean is the signal if all ranks received the same one; if not, it may still
    # be the number of some signal.
    number, remainder = divmod(requests.signal_sum, requests.signalled_ranks)
    name = "signals"
    if not remainder and number in SIGNALS:
        name = signal.Signals(int(number)).name
    if requests.signalled_ranks == 1:
        return f"{name} on rank {requests.rank_sum}"
    return f"{name} on {requests.signalled_ranks} ranks"
