"""Progress of a phase on standard error: a bar on a terminal, else lines."""

import contextlib
import datetime
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Update = Callable[[float, float | None, str], None]
"""Progress callback with three arguments: amount completed, total amount (None if
unknown), and a note that is shown beside them."""

_LINE_INTERVAL_S = 5.0
"""Interval between lines without a terminal, and between points of the history, in
seconds."""
_HISTORY_POINTS = 12
"""Points from which the time left is estimated: those of about the last minute."""


@contextlib.contextmanager
def progress(
    title: str, *, budget_s: float | None = None, never_rises: bool = False
) -> Iterator[Update]:
    """Show a phase's progress: a bar on a terminal, else a line every 5 s.

    Args:
        title: Name of the phase.
        budget_s: Time budget of the phase, in seconds; None if it has none. The shown
            time left never exceeds the rest of it.
        never_rises: Whether the shown time left may only fall, for trials: they take
            unequal times, so that an estimate from a few of them jumps.

    Yields:
        Callback to be called with each progress.
    """
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    history = _ProgressHistory(deadline_s, never_rises=never_rises)
    if sys.stderr.isatty():
        with _bar(title, history) as update_bar:
            yield update_bar
    else:
        yield _line_writer(title, history)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """Progress at a moment."""

    moment_s: float
    """Time of the monotonic clock, in seconds."""
    completed: float
    """Amount completed, in the unit of the total."""


class _ProgressHistory:
    """Records progress every few seconds, and estimates the time left from it.

    Args:
        deadline_s: End of the phase's time budget on the monotonic clock; None if it
            has none.
        never_rises: Whether the described time left may only fall.
    """

    def __init__(self, deadline_s: float | None, *, never_rises: bool) -> None:
        self._deadline_s = deadline_s
        self._never_rises = never_rises
        self._last_described_s = math.inf
        """Time left that was described last, in seconds; only with ``never_rises``."""
        self._points: deque[_Point] = deque(maxlen=_HISTORY_POINTS)

    def add(self, completed: float, total: float | None) -> bool:
        """Record a point, if it is the last or the one before is 5 s old.

        Returns:
            Whether the point was recorded.
        """
        now_s = time.monotonic()
        if self._points and not _is_finished(completed, total):
            since_last_s = now_s - self._points[-1].moment_s
            if since_last_s < _LINE_INTERVAL_S:
                return False
        self._points.append(_Point(moment_s=now_s, completed=completed))
        return True

    def describe_time_left(self, completed: float, total: float | None) -> str:
        """Return the estimated time left, as text; empty if unknown or if finished.

        The estimate is that of the last point, so call ``add`` before.
        """
        if _is_finished(completed, total):
            return ""
        first = self._points[0]
        last = self._points[-1]
        estimates_s: list[float] = []  # of which the shortest is shown
        if self._deadline_s is not None:
            if last.moment_s > self._deadline_s:
                return "over the time limit; finishing the minimum"
            estimates_s.append(self._deadline_s - last.moment_s)
        if total is not None and last.completed > first.completed:
            elapsed_s = last.moment_s - first.moment_s
            recently_completed = last.completed - first.completed
            estimates_s.append(
                (total - last.completed) * elapsed_s / recently_completed
            )
        if not estimates_s:
            return ""
        time_left_s = float(round(min(estimates_s)))
        if self._never_rises:
            time_left_s = min(time_left_s, self._last_described_s)
            self._last_described_s = time_left_s
        if time_left_s == 0:
            return "longer than expected"
        return f"{datetime.timedelta(seconds=time_left_s)} left"


def _is_finished(completed: float, total: float | None) -> bool:
    return total is not None and completed >= total


def _line_writer(title: str, history: _ProgressHistory) -> Update:
    """Return a callback that writes a line whenever the history gets a point."""

    def write_line(completed: float, total: float | None, note: str) -> None:
        if not history.add(completed, total):
            return
        line = f"{title}: "
        if total:
            line += f"{completed / total * 100:3.0f} % "
        elif completed:
            line += f"{completed:g} "
        line += note
        time_left = history.describe_time_left(completed, total)
        if time_left:
            line += f", {time_left}"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return write_line


@contextlib.contextmanager
def _bar(title: str, history: _ProgressHistory) -> Iterator[Update]:
    """Show a bar on the terminal, and yield the callback that updates it."""
    # Imported only if a bar is shown, to keep the start short.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[time_left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, note="", time_left="")

        def update_bar(completed: float, total: float | None, note: str) -> None:
            history.add(completed, total)
            bar.update(
                task,
                completed=completed,
                total=total,
                note=note,
                time_left=history.describe_time_left(completed, total),
            )

        yield update_bar
