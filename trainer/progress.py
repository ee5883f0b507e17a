"""Progress of long work, on standard error: a bar on a terminal, plain lines elsewhere."""

import contextlib
import datetime
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

Update = Callable[[float, float | None, str], None]
"""Called with (done, total or None, note)."""

PLAIN_INTERVAL_S = 5.0
_RATE_LINES = 12
"""Lines that the remaining time is told from: a minute, as earlier work may have gone at another rate."""


@contextlib.contextmanager
def progress(title: str, *, most_s: float | None = None) -> Iterator[Update]:
    """Show one stage's progress until the block ends.

    Args:
        title: Of the stage.
        most_s: What it takes at most, where it has a budget: the time left is never told to be longer.
    """
    ends_s = None if most_s is None else time.monotonic() + most_s
    with (_bar if sys.stderr.isatty() else _lines)(title, ends_s) as update:
        yield update


def _left(told: Sequence[tuple[float, float]], total: float | None, ends_s: float | None) -> str:
    """How long the rest takes at the rate of the last lines; empty while there is none."""
    (first_s, first), (last_s, last) = told[0], told[-1]
    if ends_s is not None and last_s > ends_s:
        return "its time is over, the least is finished"
    bounds = [] if ends_s is None else [ends_s - last_s]
    if total is not None and last > first:
        bounds.append((total - last) * (last_s - first_s) / (last - first))
    return f"{datetime.timedelta(seconds=round(min(bounds)))} left" if bounds else ""


@contextlib.contextmanager
def _bar(title: str, ends_s: float | None) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, note="", left="")
        told: deque[tuple[float, float]] = deque(maxlen=_RATE_LINES)

        def update(done: float, total: float | None, note: str) -> None:
            now_s = time.monotonic()
            if not told or now_s - told[-1][0] >= PLAIN_INTERVAL_S:
                told.append((now_s, done))
            bar.update(task, completed=done, total=total, note=note, left=_left(told, total, ends_s))

        yield update


@contextlib.contextmanager
def _lines(title: str, ends_s: float | None) -> Iterator[Update]:
    told: deque[tuple[float, float]] = deque(maxlen=_RATE_LINES)

    def update(done: float, total: float | None, note: str) -> None:
        now_s = time.monotonic()
        finished = total is not None and done >= total
        if not told or now_s - told[-1][0] >= PLAIN_INTERVAL_S or finished:
            told.append((now_s, done))
            share = f"{done / total * 100:3.0f} %" if total else f"{done:g}"
            left = "" if finished else _left(told, total, ends_s)
            sys.stderr.write(f"{title}: {share} {note}{left and ', '}{left}\n")
            sys.stderr.flush()

    yield update
