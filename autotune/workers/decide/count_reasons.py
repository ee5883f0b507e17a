"""Reasons for the chosen number of DataLoader workers, in words. Pure."""

from collections.abc import Callable

from autotune.base.interval import Interval
from autotune.base.units import format_share
from autotune.base.wording import format_bounds, format_times
from autotune.workers.decide.count_verdicts import ENOUGH_SHARE, CountVerdicts


def reason_for(verdicts: CountVerdicts, chosen: int) -> str:
    """Return why the chosen count is sufficient, or the evidence so far."""
    low = verdicts.lower_bound(chosen)
    if low is not None and low >= ENOUGH_SHARE:
        return (
            f"at least {format_share(low)} of the throughput on cached batches, the"
            " upper bound"
        )
    if verdicts.hardly_waits(chosen):
        wait_percent = 100 * max(verdicts.statistics.longest_wait_share(chosen), 0.0)
        return (
            f"the data wait is at most {wait_percent:.2f} % of the time, so more"
            " workers cannot help"
        )
    return _comparison(verdicts, chosen)


def _comparison(verdicts: CountVerdicts, chosen: int) -> str:
    """Return the chosen count's throughput relative to cached batches or its rival.

    The rival is the larger count that may be the fastest.
    """
    rival = verdicts.larger_rival(chosen)
    is_verified = verdicts.verdict(chosen) == "verified"
    if is_verified and rival is None:
        return "the fastest count, and the largest allowed"
    # While a count seems to reach cached batches, they are the reference of others.
    compares_with_cached = not is_verified and verdicts.reference is None
    if compares_with_cached or rival is None:
        interval = verdicts.statistics.interval(chosen, None)
        return f"{_share(interval)} of the throughput with cached batches"
    interval = verdicts.statistics.interval(chosen, rival)
    times = _with_bounds(interval, format_times)
    return (
        f"{times} the throughput with num_workers={rival}, the fastest larger"
        " count, in the same rounds"
    )


def reason_against_next_smaller(verdicts: CountVerdicts) -> str | None:
    """Return the result of the largest smaller count that was measured.

    Returns:
        None if no smaller count was measured.
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
