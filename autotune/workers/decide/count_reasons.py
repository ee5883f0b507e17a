"""Reasons for the chosen number of DataLoader workers, in words. Pure."""

from collections.abc import Callable

from autotune.base.interval import Interval
from autotune.base.units import format_share
from autotune.base.wording import format_bounds, format_times
from autotune.workers.decide.count_verdicts import CountVerdicts


def reason_for(verdicts: CountVerdicts, chosen: int) -> str:
    """Return the proof that the chosen count is sufficient, or the evidence so far."""
    verifying_bound = verdicts.verifying_bound(chosen)
    if verifying_bound is not None:
        return (
            f"at least {format_share(verifying_bound)} of the throughput on cached"
            " batches, the upper bound"
        )
    if verdicts.hardly_waits(chosen):
        wait_percent = 100 * max(verdicts.statistics.longest_wait_share(chosen), 0.0)
        return (
            f"the data wait is at most {wait_percent:.2f} % of the time, so more"
            " workers cannot help"
        )
    return _comparison(verdicts, chosen)


def _comparison(verdicts: CountVerdicts, chosen: int) -> str:
    """Return the chosen count's throughput as a multiple of a reference's, in words.

    The reference is the larger count that may be the fastest. It is cached batches if
    no larger count was measured, or while a count seems to reach them.
    """
    rival = verdicts.larger_rival(chosen)
    is_verified = verdicts.verdict(chosen) == "verified"
    if is_verified and rival is None:
        return "the fastest count, and the largest allowed"
    seems_to_reach_cached = not is_verified and verdicts.reference is None
    if seems_to_reach_cached or rival is None:
        interval = verdicts.statistics.interval(chosen, None)
        return f"{_share(interval)} of the throughput with cached batches"
    interval = verdicts.statistics.interval(chosen, rival)
    times = _with_bounds(interval, format_times)
    return (
        f"{times} the throughput with num_workers={rival}, the fastest larger"
        " count, in the same rounds"
    )


def reason_against_next_smaller(verdicts: CountVerdicts) -> str | None:
    """Return the result of the next smaller count that was measured, in words.

    Returns:
        None if no smaller count than the candidate was measured.
    """
    smaller = verdicts.next_smaller
    if smaller is None:
        return None
    refuting_bound = verdicts.refuting_bound(smaller)
    if refuting_bound is not None:
        return (
            f"num_workers={smaller} is too few: at most {format_times(refuting_bound)}"
            " the throughput of larger counts in the same rounds"
        )
    if smaller <= verdicts.largest_refuted:
        return (
            f"num_workers={smaller} is too few, because {verdicts.largest_refuted} is"
        )
    interval = verdicts.statistics.interval(smaller, None)
    return (
        f"num_workers={smaller} may be sufficient: {_share(interval)} of the"
        " throughput with cached batches"
    )


def _share(ratio: Interval) -> str:
    """Return a ratio to cached batches as a share of their throughput, with bounds."""
    return _with_bounds(ratio, format_share)


def _with_bounds(ratio: Interval, form: Callable[[float], str]) -> str:
    """Return a ratio, followed by its bounds in parentheses if it has any."""
    bounds = format_bounds(ratio.low, ratio.high, form)
    value = form(ratio.value)
    return value if bounds is None else f"{value} ({bounds})"
