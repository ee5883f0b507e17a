"""Progress display on standard error, output of rank 0 during training, and tolerance of closed streams."""

import contextlib
import datetime
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from trainer.health.events import EventRow
from trainer.record.run_record import EvaluationRow, RunHeader, StepRow

Update = Callable[[float, float | None, str], None]
"""Progress callback with the arguments (done, total or None, note)."""

PLAIN_INTERVAL_S = 5.0
_RATE_LINES = 12
"""Lines that the estimate of the remaining time uses: about a minute."""


@contextlib.contextmanager
def progress(title: str, *, most_s: float | None = None) -> Iterator[Update]:
    """Show a phase's progress: a bar on a terminal, else a line every 5 s.

    Its time left never exceeds ``most_s``.
    """
    ends_s = None if most_s is None else time.monotonic() + most_s
    told: deque[tuple[float, float]] = deque(maxlen=_RATE_LINES)
    with _bar(title) if sys.stderr.isatty() else contextlib.nullcontext() as show:

        def update(done: float, total: float | None, note: str) -> None:
            now_s = time.monotonic()
            finished = total is not None and done >= total
            due = not told or now_s - told[-1][0] >= PLAIN_INTERVAL_S or finished
            if due:
                told.append((now_s, done))
            left = "" if finished else _left(told, total, ends_s)
            if show is not None:
                show(completed=done, total=total, note=note, left=left)
            elif due:
                share = f"{done / total * 100:3.0f} %" if total else f"{done:g}"
                sys.stderr.write(f"{title}: {share} {note}{left and ', '}{left}\n")
                sys.stderr.flush()

        yield update


def _left(
    told: Sequence[tuple[float, float]], total: float | None, ends_s: float | None
) -> str:
    """Return the estimated time left, as text, from the rate of the last lines.

    Empty if unknown.
    """
    (first_s, first), (last_s, last) = told[0], told[-1]
    if ends_s is not None and last_s > ends_s:
        return "over the time limit; finishing the minimum"
    bounds = [] if ends_s is None else [ends_s - last_s]
    if total is not None and last > first:
        bounds.append((total - last) * (last_s - first_s) / (last - first))
    return f"{datetime.timedelta(seconds=round(min(bounds)))} left" if bounds else ""


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    texts = [
        TextColumn(f"{{task.{name}}}", markup=False)
        for name in ("description", "fields[left]", "fields[note]")
    ]
    columns = (
        SpinnerColumn(),
        texts[0],
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        *texts[1:],
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield functools.partial(
            bar.update, bar.add_task(title, total=None, note="", left="")
        )


class _Forgiving:
    """Stream that discards its output after its reader has closed it, without an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def ignore_closed_streams() -> None:
    """Ignore write errors on standard streams, such as a closed terminal, or a ``tee`` that Ctrl-C ended first."""
    sys.stdout, sys.stderr = _Forgiving(sys.stdout), _Forgiving(sys.stderr)


def show_row(
    update: Update, steps: int, row: RunHeader | StepRow | EvaluationRow | EventRow
) -> None:
    """Advance the bar for a logged step of ``steps``.

    Write lines for the header of a run and all other rows.
    """
    if isinstance(row, StepRow):
        mfu = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        loss = "n/a" if row.loss is None else f"{row.loss:.3f}"
        note = (
            f"step {row.step}/{steps} loss {loss} {row.tokens_per_s:,.0f} non-padding"
            f" tokens/s{mfu}"
        )
        update(row.step, steps, note)
        return
    if isinstance(row, RunHeader):
        batch = f"{row.global_batch_size} {row.layout} sequences per step"
        lines = [f"train: {batch}; attention: {row.attention} ({row.attention_reason})"]
        if row.config["compile"]:
            lines.append(
                "train: compiling layers before the first step; this takes minutes"
            )
        lines += [f"train: recipe change: {change}" for change in row.recipe_changes]
    elif isinstance(row, EvaluationRow):
        said = (
            f"loss {row.loss:.3f} perplexity {row.perplexity:,.1f} masked accuracy"
            f" {row.masked_accuracy:.1%}"
        )
        lines = [f"validation: step {row.step} {said}"]
    elif row.level == "info":
        lines = [f"train: {row.message}"]
    else:
        lines = [
            f"{row.level}: {row.message}",
            *(f"  likely: {cause}" for cause in row.causes[:2]),
        ]
        lines += [f"  next: {row.next_step}"] if row.next_step else []
    sys.stderr.write("".join(f"{line}\n" for line in lines))
