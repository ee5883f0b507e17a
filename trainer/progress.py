"""Progress of long work, on standard error: a bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Update = Callable[[float, float | None, str], None]
"""Called with (done, total or None, note)."""

PLAIN_INTERVAL_S = 5.0


@contextlib.contextmanager
def progress(title: str) -> Iterator[Update]:
    """Show one stage's progress until the block ends."""
    if sys.stderr.isatty():
        with _bar(title) as update:
            yield update
    else:
        with _lines(title) as update:
            yield update


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
    last_s = -PLAIN_INTERVAL_S

    def update(done: float, total: float | None, note: str) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        finished = total is not None and done >= total
        if now_s - last_s >= PLAIN_INTERVAL_S or finished:
            last_s = now_s
            share = f"{done / total * 100:3.0f} %" if total else f"{done:g}"
            sys.stderr.write(f"{title}: {share} {note}\n")
            sys.stderr.flush()

    yield update
