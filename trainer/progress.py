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
def progress(title: str) -> Iterator[Update]:
    """Show one stage's progress until the block ends."""
    if sys.stderr.isatty():
        with _bar(title) as update:
            yield update
    else:
        with _lines(title) as update:
            yield update


def _left(told: Sequence[tuple[float, float]], total: float) -> str:
    """How long the rest takes at the rate of the last lines; empty while there is none."""
    (first_s, first), (last_s, last) = told[0], told[-1]
    if last <= first:
        return ""
    return f", {datetime.timedelta(seconds=round((total - last) * (last_s - first_s) / (last - first)))} left"


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, note="")

        def update(done: float, total: float | None, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield update


@contextlib.contextmanager
def _lines(title: str) -> Iterator[Update]:
    told: deque[tuple[float, float]] = deque(maxlen=_RATE_LINES)

    def update(done: float, total: float | None, note: str) -> None:
        now_s = time.monotonic()
        finished = total is not None and done >= total
        if not told or now_s - told[-1][0] >= PLAIN_INTERVAL_S or finished:
            told.append((now_s, done))
            share = f"{done / total * 100:3.0f} %" if total else f"{done:g}"
            left = "" if total is None or finished else _left(told, total)
            sys.stderr.write(f"{title}: {share} {note}{left}\n")
            sys.stderr.flush()

    yield update
