"""What ranks tell each other with every step: signals that one of them got, and what is due by the first one's clock.

It travels with the number of tokens, which all ranks add up in any case, so agreeing costs no message of its own; and
every rank reads it at the same place of its loop.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.watch import SIGNALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know after a step."""

    stop_reason: str | None
    """Why training is to save and leave; None while it goes on."""
    save_is_due: bool


def tell(*, rank: int, signal_number: int | None, time_is_over: bool, save_is_due: bool) -> list[float]:
    """What a rank tells, as numbers that are added up over ranks."""
    signalled = signal_number is not None
    return [float(signalled), float(signalled and rank), float(signal_number or 0), time_is_over, save_is_due]


def agreed(told: Sequence[float]) -> Agreed:
    """What the sums over all ranks of what ``tell`` gave mean."""
    count, ranks, numbers, time_is_over, save_is_due = (round(one) for one in told)
    reason = None
    if count:
        number, rest = divmod(numbers, count)
        known = not rest and number in SIGNALS
        name = signal.Signals(number).name if known else "signals"
        reason = f"{name} on rank {ranks}" if count == 1 else f"{name} on {count} ranks"
    elif time_is_over:
        reason = "the time (train.stop_after_s, or the SLURM job's) is nearly over"
    return Agreed(stop_reason=reason, save_is_due=bool(save_is_due))
